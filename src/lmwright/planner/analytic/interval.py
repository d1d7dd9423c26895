"""Interval: how far off a predicted step time can be, from what published runs took.

Nine of ten rows of `benchmarks/published_tpu.toml` that nothing was fitted to lie within COMPILED
of what `benchmarks/plan_accuracy.py` predicts of them, and within QUICK of what it does with
`--quick`. All of them are dense decoders; where nothing was fitted, the interval is wider.
"""

from lmwright.config.run import Run
from lmwright.hardware.chips import CHIPS
from lmwright.planner.analytic.layout import stocks_of

COMPILED = 0.20
QUICK = 0.20
FARTHER = 0.15
"""More for experts, for adapters on a frozen base, and for a generation without a published run.
`--quick` gives two runs of Mixtral 8x7B on v6e, which drop tokens over a capacity of 1.25, 15 and
24 % less than they took."""
ASSUMED = 0.75
"""On GPUs, of which no run was compared, and CPUs, of which one was."""


def error_share(kind: str, run: Run, *, compiled: bool) -> float:
    """Half the width of the interval around a step of the run on a machine of this kind: a TPU
    generation, a GPU or `cpu`."""
    if kind not in CHIPS:
        return ASSUMED
    share = COMPILED if compiled else QUICK
    weights = [w for stock in stocks_of(run) for w in stock.weights]
    farther = not CHIPS[kind].calibrated or any(w.is_expert or not w.trained for w in weights)
    return share + FARTHER * farther
