"""How far a rounded model is from the floats that it was made of, on rows of text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.models.decoder import Decoder
from lmwright.quantize.layers import Runner, Weights, goes_by_layers, layers_of
from lmwright.quantize.rows import batch_of

Both = tuple[Any, Any]
"""What belongs to the floats, and to the rounded model."""


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
    model: Model, weights: tuple[Weights, Weights], rows: np.ndarray, compute: Compute
) -> Difference:
    """The difference of the floats and of what they were rounded to, two sets of weights of a
    model, on rows int32 [N, T]."""
    batches = [batch_of(row[None]) for row in rows]
    how = _by_layers if goes_by_layers(model) else _at_once
    sums = sum(np.asarray(each) for each in how(model, weights, batches, compute))
    count, kl, same, *losses = map(float, sums)
    before, after = (math.exp(loss / losses[2]) for loss in losses[:2])
    perplexities = None if model.both_ways else (before, after)
    return Difference(int(count), max(kl / count, 0.0), same / count, perplexities)


def _at_once(
    model: Model, weights: tuple[Weights, Weights], rows: list[Batch], compute: Compute
) -> Iterator[Array]:
    """The sums of each row, of models that are in memory as a whole."""
    trees = tuple(each.tree() for each in weights)

    def of_row(trees: Both, batch: Batch) -> Array:
        return _sums(model, trees, [model.hidden(w, batch, compute)[0] for w in trees], batch)

    measure = jax.jit(of_row)
    return (measure(trees, batch) for batch in rows)


def _by_layers(
    model: Decoder, weights: tuple[Weights, Weights], rows: list[Batch], compute: Compute
) -> Iterator[Array]:
    """The sums of each row, with a layer of both models in memory."""
    runner, outer = Runner(model, compute), tuple(each.outer() for each in weights)
    streams = [[runner.begin(w, batch) for w in outer] for batch in rows]
    for stack, number, kind in layers_of(model):
        layer = [each.layer(stack, number) for each in weights]
        streams = [
            [runner.run(kind, w, x, batch) for w, x in zip(layer, pair, strict=True)]
            for pair, batch in zip(streams, rows, strict=True)
        ]

    def of_row(outer: Both, streams: list[Array], batch: Batch) -> Array:
        ends = [model.stream_norm(w, x) for w, x in zip(outer, streams, strict=True)]
        return _sums(model, outer, ends, batch)

    measure = jax.jit(of_row)
    return (measure(outer, pair, batch) for pair, batch in zip(streams, rows, strict=True))


def _sums(model: Model, trees: Both, hidden: list[Array], batch: Batch) -> Array:
    """float32 [6]: tokens, divergence, equal choices, both losses, targets; from the streams
    [B, T, D] after the last norm."""
    first, second = (
        jax.nn.log_softmax(model.logits(w, x), axis=-1) for w, x in zip(trees, hidden, strict=True)
    )
    kl = jnp.sum(jnp.exp(first) * (first - second))
    same = jnp.sum(jnp.argmax(first, -1) == jnp.argmax(second, -1))
    target = batch.tokens[:, 1:, None]
    losses: list[Any] = [
        -jnp.sum(jnp.take_along_axis(each[:, :-1], target, axis=-1)) for each in (first, second)
    ]
    return jnp.stack([jnp.asarray(a, jnp.float32) for a in (
        batch.tokens.size, kl, same, *losses, target.size)])  # fmt: skip
