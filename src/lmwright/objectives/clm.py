"""Causal language modeling: each token predicts the next one of its segment."""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import NonNegative, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Aux, Batch, Loss, Metrics, Model, Objective
from lmwright.core.param import Tree
from lmwright.kernels import select


@section
class Clm(Objective):
    """Next-token prediction."""

    kind: Literal["clm"] = "clm"
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting."""

    sums_head_once: ClassVar[bool] = True

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's targets; `key` is unused, nothing is sampled."""
        return next_token_loss(model, w, w, batch, compute, z_loss=self.z_loss)


def next_token_loss(
    model: Model, w: Tree, head: Tree, batch: Batch, compute: Compute, **options: float
) -> Loss:
    """Cross-entropy of the batch's targets; the layers read `w` and the logits `head`. `options`
    are those of `nn.xent.chunked_xent`."""
    x, aux = model.hidden(w, batch, compute)
    targets, weights = next_tokens(batch)
    return loss_at(model, head, x, aux, targets, weights, compute, **options)


def loss_at(
    model: Model, head: Tree, x: Array, aux: Aux, targets: Array, weights: Array, compute: Compute,
    **options: float,
) -> Loss:  # fmt: skip
    """Cross-entropy of targets [B, T] with weights after the residual stream x [B, T, D], with what
    the layers add to it; `aux` is what `model.hidden` returned beside x."""
    sums = select.cross_entropy(compute)(
        model.logits,
        model.head_weights(head),
        x,
        targets,
        weights,
        chunk=compute.loss_chunk_tokens,
        sum_once=compute.head_gradient == "once",
        **options,
    )
    weight = jnp.sum(weights)
    metrics = {
        "nll": (sums.nll, weight),
        "accuracy": (sums.correct, weight),
        "z": (sums.z, weight),
    }
    return with_penalties(Loss(sums.total, weight, metrics), model, aux)


def next_tokens(batch: Batch) -> tuple[Array, Array]:
    """Targets int32 and their weights float32, both [B, T], aligned with the predictor; the
    last place of a row has none."""
    targets = jnp.roll(batch.tokens, -1, axis=1)
    weights = jnp.roll(batch.loss_weight, -1, axis=1).at[:, -1].set(0.0)
    return targets, weights


def with_penalties(loss: Loss, model: Model, aux: Aux) -> Loss:
    """The loss with what the model's experts add to that of each token, and their metrics."""
    added, metrics = penalties(model, aux)
    return Loss(loss.total + added * loss.weight, loss.weight, loss.metrics | metrics)


def penalties(model: Model, aux: Aux) -> tuple[Array | float, Metrics]:
    """Losses that a model's experts add to the mean loss of a token, and their metrics; `aux` are
    the sums that `model.hidden` returned beside the residual stream."""
    total: Array | float = 0.0
    metrics: Metrics = {}
    for prefix, experts in model.mixtures.items():
        if f"{prefix}_counts" in aux:
            added, new = experts.penalty(aux, prefix)
            total, metrics = total + added, metrics | new
    return total, metrics
