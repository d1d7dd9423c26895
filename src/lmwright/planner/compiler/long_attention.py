"""Cost of `kernels/tpu_long_attention.py`: by blocks, by steps of its grid, and by spans.

Cycles are those of the compiler's own schedule, as `benchmarks/long_attention_schedule.py` reads
it, without waits for memory; never less than the matrix units need for a block's products.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from lmwright.hardware.chips import CHIPS, Rates
from lmwright.kernels.tpu_spans import Sizes, spans_met
from lmwright.nn.intervals import Reach

WAYS = ("long_attention_fwd", "long_attention_bwd")
PRODUCTS = (2, 5)
"""Matrix products for each score, forward and backward, of queries, keys, values and gradients."""


@dataclass(frozen=True)
class LongCycles:
    """Cycles of one core."""

    plain: float
    """Cycles for 1,000 scores of a block whose queries see all of its keys."""
    masked: float
    """Cycles for 1,000 scores of another block that some queries see."""
    step: float
    """Cycles of a step of the grid, beside its blocks."""
    span: float
    """Cycles of a span of the outer side, beside its steps."""


CYCLES: dict[str, dict[int, tuple[LongCycles, LongCycles]]] = {
    "v4": {
        64: (LongCycles(5.73, 6.66, 414, 301), LongCycles(7.49, 9.75, 1097, 1563)),
        96: (LongCycles(6.11, 7.24, 448, 348), LongCycles(8.51, 10.79, 1188, 1858)),
        128: (LongCycles(6.72, 7.55, 527, 326), LongCycles(9.75, 11.91, 1245, 2065)),
        256: (LongCycles(10.29, 10.96, 519, 298), LongCycles(18.43, 19.18, 1232, 2152)),
    },
    "v5e": {
        64: (LongCycles(3.63, 3.93, 318, 161), LongCycles(6.25, 6.62, 869, 1191)),
        128: (LongCycles(4.48, 4.79, 451, 252), LongCycles(8.97, 8.88, 1412, 1595)),
        256: (LongCycles(8.21, 8.21, 435, 246), LongCycles(17.36, 18.08, 1385, 1568)),
    },
    "v5p": {
        128: (LongCycles(4.57, 4.85, 432, 254), LongCycles(9.09, 8.68, 1225, 1595)),
    },
    "v6e": {
        64: (LongCycles(2.46, 3.09, 271, 91), LongCycles(3.82, 4.23, 734, 821)),
        128: (LongCycles(2.7, 3.46, 321, 164), LongCycles(4.28, 4.63, 1003, 1091)),
        256: (LongCycles(3.51, 4.02, 307, 163), LongCycles(5.09, 5.6, 935, 1128)),
    },
    "7x": {
        128: (LongCycles(2.58, 3.28, 311, 161), LongCycles(3.86, 3.74, 936, 1058)),
        256: (LongCycles(3.28, 3.91, 291, 158), LongCycles(4.31, 4.54, 845, 1057)),
    },
}
"""Cycles, forward and backward, by generation and head size."""

BANDS: dict[str, dict[int, tuple[float, float]]] = {
    "v4": {64: (7.39, 10.69), 128: (8.29, 11.83), 256: (11.1, 20.09)},
    "v5e": {64: (4.78, 8.86), 128: (5.76, 10.04), 256: (8.08, 17.17)},
    "v5p": {64: (4.69, 8.9), 128: (5.34, 9.75), 256: (7.9, 16.91)},
    "v6e": {64: (4.4, 6.11), 128: (5.0, 7.05), 256: (5.89, 8.8)},
    "7x": {64: (4.04, 5.73), 128: (4.53, 6.72), 256: (5.39, 7.79)},
}
"""Cycles for 1,000 scores of a band's blocks (`tpu_spans.Sizes.band`), forward and backward, of
256 queries and 512 keys: smaller ones, in which less is under way at once."""


@dataclass(frozen=True)
class Visits:
    """Blocks, steps and spans of one head and row."""

    plain: int
    masked: int
    steps: int


@cache
def visits(sizes: Sizes, reach: Reach) -> Visits:
    """Visits of the kernel to a row of one segment."""
    plain = masked = 0
    met = sum(map(sum, spans_met(sizes, reach)))
    if sizes.band:
        blocks = sizes._replace(span_q=sizes.block_q)
        return Visits(0, sum(map(sum, spans_met(blocks, reach))), met)
    for query in range(0, sizes.tokens, sizes.block_q):
        for key in range(0, sizes.tokens, sizes.block_k):
            pair = range(query, query + sizes.block_q), range(key, key + sizes.block_k)
            every = reach.covers(*pair)
            plain, masked = plain + every, masked + (reach.meets(*pair) and not every)
    return Visits(plain, masked, met)


@cache
def long_attention_s(
    generation: str, rates: Rates, head_dim: int, sizes: Sizes, reach: Reach, way: int
) -> float:
    """Seconds of one head and row of the kernel, forward (way 0) or backward (1)."""
    known, bands = CYCLES[generation], BANDS[generation]

    def at(name: str) -> float:
        values = [getattr(cycles[way], name) for cycles in known.values()]
        return float(np.interp(head_dim, list(known), values))

    peak = CHIPS[generation].peak.bf16_flops / (rates.clock_hz * rates.cores)
    least = 1000 * PRODUCTS[way] * 2 * head_dim / peak
    met, spans = visits(sizes, reach), sizes.spans_k if way else sizes.spans_q
    thousands = sizes.block_q * sizes.block_k / 1000
    masked = at("masked")
    if sizes.band:
        masked = float(np.interp(head_dim, list(bands), [ways[way] for ways in bands.values()]))
    cycles = thousands * met.plain * max(at("plain"), least)
    cycles += thousands * met.masked * max(masked, least)
    cycles += met.steps * at("step") + spans * at("span")
    return cycles / (rates.kernel_share * rates.clock_hz * rates.cores)
