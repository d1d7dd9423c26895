"""Held-out loss per source: nats per token, perplexity, bits per byte.

Bits per byte divides the loss over all predicted tokens (ends of documents included) by the
UTF-8 bytes of those tokens, so that tokenizers can be compared.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model, Objective
from lmwright.core.param import Tree
from lmwright.kernels.select import compiler_options

Rows = dict[str, np.ndarray]  # tokens, segment_ids, positions, loss_weight, text_bytes


@dataclass(frozen=True)
class SourceLoss:
    """Means over one source; `loss` is in nats per predicted token."""

    source: str
    loss: float
    accuracy: float
    tokens: int
    text_bytes: int
    """UTF-8 bytes of these tokens; 0 where they are only some of a text's."""
    rows: int = 0
    of_rows: int = 0
    """Rows that the source has; 0 where it has no rows, as a text."""
    confusion: np.ndarray | None = field(default=None, compare=False)
    """Of a classifier, documents [K, K] by class and by the class that they were given."""

    mrr: float | None = None
    """Of vectors, the mean of the inverse rank of what belongs to a text, 0 beyond the tenth."""

    @property
    def rows_text(self) -> str:
        """Text such as "128 of 352 rows"; empty without rows."""
        if not self.of_rows:
            return ""
        return f"{self.rows:,} of {self.of_rows:,} rows"

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """None where only some tokens of a text are predicted."""
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / math.log(2) / self.text_bytes


@lru_cache(maxsize=8)
def _sums(model: Model, objective: Objective, compute: Compute) -> Callable[..., dict[str, Any]]:
    def metrics(w: Tree, batch: Batch) -> dict[str, Any]:
        return objective.for_eval().loss(model, w, batch, jax.random.key(0), compute).metrics

    return compiled(metrics, compute)


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
) -> SourceLoss:
    """Loss over batches of packed rows; `place` puts a batch on the devices."""
    nll = correct = tokens = 0.0
    text_bytes, confusion = 0.0, None
    for rows in batches:
        sums = _sums(model, objective, compute)(weights, place(batch_of(rows)))
        nll += float(sums["nll"][0])
        tokens += float(sums["nll"][1])
        correct += float(sums["accuracy"][0])
        if "confusion" in sums:
            confusion = np.asarray(sums["confusion"][0]) + (0 if confusion is None else confusion)
        every = round(float(sums["nll"][1])) == np.count_nonzero(rows["loss_weight"])
        text_bytes += 0 if objective.both_ways and not every else float(rows["text_bytes"].sum())
    count = max(tokens, 1.0)
    return SourceLoss(
        source, nll / count, correct / count, round(tokens), int(text_bytes), confusion=confusion
    )
