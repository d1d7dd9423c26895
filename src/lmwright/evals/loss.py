"""Held-out loss per source: nats per token, perplexity, bits per byte.

Bits per byte divides the loss over all predicted tokens (ends of documents included) by the
UTF-8 bytes of those tokens, so that tokenizers can be compared.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lmwright.config.rows import ANY_LABELS, HAVE_LABELS, TAGGED_WORDS
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model, Objective
from lmwright.core.param import Tree
from lmwright.evals.entities import entity_counts, f1_of
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
    scores: dict[str, float] = field(default_factory=dict, compare=False)
    """Means of `Objective.held_out_metrics`."""
    numbers: np.ndarray | None = field(default=None, compare=False)
    """Where documents have a number, float64 [documents, 2]: theirs and the one given. `loss` is
    then the mean squared error."""
    label_counts: np.ndarray | None = field(default=None, compare=False)
    """Of classes of which a text may have any number, float64 [K, 3]: texts that rightly were given
    a class, that were given it, and that have it."""
    entities: np.ndarray | None = field(default=None, compare=False)
    """Of tagged words, float64 [3]: entities that are right, were given, and are there."""
    mrr: float | None = None
    """Of vectors, the mean of the inverse rank of what belongs to a text, 0 beyond the tenth."""

    @property
    def entity_f1(self) -> float | None:
        """F1 of entities, as seqeval's; None where words have no tags."""
        return None if self.entities is None else f1_of(self.entities)

    @property
    def rows_text(self) -> str:
        """Text such as "128 of 352 rows"; empty without rows."""
        if not self.of_rows:
            return ""
        return f"{self.rows:,} of {self.of_rows:,} rows"

    @property
    def scores_text(self) -> str:
        """Text such as "detector loss 0.1234"; empty without scores."""
        return ", ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in self.scores.items())

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
    text_bytes, confusion, numbers = 0.0, None, []
    entities, counts = np.zeros(3), 0.0
    more = {name: np.zeros(2) for name in objective.held_out_metrics}
    for rows in batches:
        sums = _sums(model, objective, compute)(weights, place(batch_of(rows)))
        total, count = map(float, sums["nll" if "nll" in sums else "mse"])
        nll += total
        tokens += count
        correct += float(sums["accuracy"][0]) if "accuracy" in sums else 0.0
        for name, pair in more.items():
            pair += [float(value) for value in sums[name]]
        if "confusion" in sums:
            confusion = np.asarray(sums["confusion"][0]) + (0 if confusion is None else confusion)
        if "label_counts" in sums:
            counts = np.asarray(sums["label_counts"][0], np.float64) + counts
        if "tags" in sums:
            entities = entities + _entities(sums["tags"][0], objective.labels)
        if "numbers" in sums:
            numbers.append(_pairs(sums["numbers"][0]))
        every = round(count) == np.count_nonzero(rows["loss_weight"])
        some = objective.learns_from in (*HAVE_LABELS, TAGGED_WORDS) or (
            objective.both_ways and not every
        )
        text_bytes += 0 if some else float(rows["text_bytes"].sum())
    count = max(tokens, 1.0)
    return SourceLoss(
        source, nll / count, correct / count, round(tokens), int(text_bytes), confusion=confusion,
        scores={name: total / max(weight, 1.0) for name, (total, weight) in more.items()},
        numbers=np.concatenate(numbers) if numbers else None,
        label_counts=np.asarray(counts) if objective.learns_from == ANY_LABELS else None,
        entities=entities if objective.learns_from == TAGGED_WORDS else None,
    )  # fmt: skip


def of_all_hosts(found: jax.Array) -> np.ndarray:
    """An array of rows, those of all hosts."""
    if not found.is_fully_addressable:
        found = multihost_utils.process_allgather(found, tiled=True)
    return np.asarray(found)


def _entities(found: jax.Array, labels: Sequence[str]) -> np.ndarray:
    """float64 [3]: counts of entities in rows [B, T, 3], of which the last is the number of a
    word's document in its row, 0 for tokens without a tag."""
    real, given = [], []
    for row in of_all_hosts(found):
        for document in range(1, int(row[:, 2].max(initial=0)) + 1):
            words = row[row[:, 2] == document]
            real.append([labels[int(tag)] for tag in words[:, 0]])
            given.append([labels[int(tag)] for tag in words[:, 1]])
    return entity_counts(real, given)


def _pairs(found: jax.Array) -> np.ndarray:
    """float64 [documents, 2] of rows [B, S, 3], of which the last says whether one is there."""
    flat = of_all_hosts(found).astype(np.float64).reshape(-1, 3)
    return flat[flat[:, 2] > 0, :2]
