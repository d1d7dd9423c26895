"""Held-out losses of rows, by source (`evals.source_loss`).

    rows --measure, compiled--> sums of a batch --RowTally.add--> RowTally.loss: a SourceLoss

An objective with other scores names a RowTally of its own (`Objective.tally`).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from lmwright.config.run import Run
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model, Objective
from lmwright.core.param import Tree
from lmwright.evals.source_loss import SourceLoss
from lmwright.kernels.select import compiler_options

if TYPE_CHECKING:
    from lmwright.data.rows.store import TokenStore

Rows = dict[str, Any]
"""Arrays: tokens, segment_ids, positions, loss_weight, text_bytes; and what a tally wants to know
of them."""


class RowTally:
    """Sums over the held-out rows of one source."""

    mean: ClassVar[str] = "nll"
    """The metric whose mean is the loss."""

    def __init__(self, objective: Any):
        self.objective = objective
        self.total = self.count = self.right = self.judged = 0.0

    def batches(self, run: Run, store: "TokenStore", source: str, num_rows: int) -> Iterable[Rows]:
        """Held-out rows of a source in batches of `num_rows`, at most `eval.max_rows`."""
        return store.eval_batches(source, num_rows, run.eval.max_rows)

    @staticmethod
    def measure(model: Model, objective: Any, w: Tree, batch: Batch, compute: Compute) -> Any:
        """Sums of a batch, as `add` takes them; traceable."""
        return objective.for_eval().loss(model, w, batch, jax.random.key(0), compute).metrics

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch, of which `measure` returned `sums`."""
        total, count = map(float, sums[self.mean])
        self.total += total
        self.count += count
        right, judged = map(float, sums.get("accuracy", (0.0, 0.0)))
        self.right, self.judged = self.right + right, self.judged + judged

    @property
    def means(self) -> tuple[float, float, int]:
        """The mean loss, the accuracy, and the number of tokens, texts or words."""
        count = max(self.count, 1.0)
        return self.total / count, self.right / max(self.judged, 1.0), round(self.count)

    def loss(self, source: str) -> SourceLoss:
        """The scores of the source."""
        raise NotImplementedError


class TokenRowTally(RowTally):
    """Tally of predicted tokens."""

    def __init__(self, objective: Any):
        super().__init__(objective)
        self.text_bytes = 0.0
        self.more = {name: np.zeros(2) for name in objective.held_out_metrics}

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch, and the bytes of its text where all of its tokens are predicted."""
        super().add(rows, sums)
        for name, pair in self.more.items():
            pair += [float(value) for value in sums[name]]
        every = round(float(sums[self.mean][1])) == np.count_nonzero(rows["loss_weight"])
        if every or not self.objective.both_ways:
            self.text_bytes += float(rows["text_bytes"].sum())

    def loss(self, source: str) -> SourceLoss:
        """The loss, and the objective's own metrics."""
        scores = {name: total / max(weight, 1.0) for name, (total, weight) in self.more.items()}
        return SourceLoss(source, *self.means, int(self.text_bytes), scores=scores)


def tally_of(objective: Objective) -> RowTally:
    """An empty tally of the class that an objective names."""
    module, _, name = objective.tally.partition(".")
    tally: RowTally = getattr(import_module(f"lmwright.evals.{module}"), name)(objective)
    return tally


@lru_cache(maxsize=8)
def _measure(
    tally: type[RowTally], model: Model, objective: Objective, compute: Compute
) -> Callable[..., Any]:
    def sums(w: Tree, batch: Batch) -> Any:
        return tally.measure(model, objective, w, batch, compute)

    return compiled(sums, compute)


def compiled(fn: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    """`fn` under jit, with the compiler's options for this platform."""
    options = compiler_options(compute, jax.local_devices()[0].device_kind)
    return jax.jit(fn, compiler_options=options)


def batch_of(rows: Rows) -> Batch:
    """The rows as a model reads them."""
    return Batch(**{name: rows[name] for name in Batch.__dataclass_fields__})


def evaluate_rows(
    model: Model,
    objective: Objective,
    compute: Compute,
    weights: Tree,
    source: str,
    batches: Iterable[Rows],
    place: Callable[[Batch], Batch] = lambda batch: batch,
    tally: RowTally | None = None,
) -> SourceLoss:
    """Scores of batches of packed rows, which are added to `tally`, an empty one if unset; `place`
    puts a batch on the devices."""
    tally = tally or tally_of(objective)
    measure = _measure(type(tally), model, objective, compute)
    for rows in batches:
        tally.add(rows, measure(weights, place(batch_of(rows))))
    return tally.loss(source)
