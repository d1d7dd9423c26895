"""How far a rounded model is from the floats that it was made of, on rows of text."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.quantize.rows import batch_of


@dataclass(frozen=True)
class Difference:
    """Means over the tokens of the rows."""

    tokens: int
    kl: float
    """Kullback-Leibler divergence of the rounded model's predictions from those of the floats, in
    nats a token."""
    greedy: float
    """Share of tokens of which both predict the same as the likeliest."""
    perplexities: tuple[float, float] | None
    """Perplexity of the floats and of the rounded model; None for a model that predicts no next
    tokens."""

    def line(self) -> str:
        """The figures as a sentence."""
        text = f"KL {self.kl:.4f} nats a token, greedy choice equal at {self.greedy:.1%}"
        if self.perplexities is None:
            return text
        before, after = self.perplexities
        return f"perplexity {before:.2f} before, {after:.2f} after; {text}"


def compare(
    model: Model, floats: Tree, rounded: Tree, rows: np.ndarray, compute: Compute
) -> Difference:
    """The difference of two sets of weights of a model on rows int32 [N, T], one at a time."""
    measure = jax.jit(partial(_sums, model, compute))
    sums = sum(np.asarray(measure(floats, rounded, batch_of(row[None]))) for row in rows)
    count, kl, same, *losses = map(float, sums)
    before, after = (math.exp(loss / losses[2]) for loss in losses[:2])
    perplexities = None if model.both_ways else (before, after)
    return Difference(int(count), max(kl / count, 0.0), same / count, perplexities)


def _sums(model: Model, compute: Compute, floats: Tree, rounded: Tree, batch: Batch) -> Array:
    """float32 [6]: tokens, divergence, equal choices, both losses, targets."""
    first, second = (_predicted(model, w, batch, compute) for w in (floats, rounded))
    kl = jnp.sum(jnp.exp(first) * (first - second))
    same = jnp.sum(jnp.argmax(first, -1) == jnp.argmax(second, -1))
    target = batch.tokens[:, 1:, None]
    losses: list[Any] = [
        -jnp.sum(jnp.take_along_axis(each[:, :-1], target, axis=-1)) for each in (first, second)
    ]
    return jnp.stack([jnp.asarray(a, jnp.float32) for a in (
        batch.tokens.size, kl, same, *losses, target.size)])  # fmt: skip


def _predicted(model: Model, w: Tree, batch: Batch, compute: Compute) -> Array:
    hidden, _ = model.hidden(w, batch, compute)
    return jax.nn.log_softmax(model.logits(w, hidden), axis=-1)
