"""Cross-entropy of classes, with weights for rare ones and smoothed targets.

Both are as in torch's `CrossEntropyLoss` and `BCEWithLogitsLoss`.
"""

from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive
from lmwright.core.contract import Loss, Model
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.objectives.clm import with_penalties
from lmwright.objectives.documents import Judged

ClassWeights = Annotated[
    tuple[Positive, ...],
    Field(
        description="Weights of the classes in the loss, in the order of `labels`, as in "
        "[1.0, 4.0] for a second class that is rare; the loss is a weighted mean. Unset: all equal."
    ),
]
PositiveWeights = Annotated[
    tuple[Positive, ...],
    Field(
        description="Weights of texts that have a class, in the loss of that class, in the order "
        "of `labels`; above 1 for rare classes. Unset: all 1."
    ),
]
Smoothing = Annotated[
    float,
    Field(ge=0, lt=1, description="Share of each target that is spread over all classes."),
]


def check_weights(field: str, weights: Sequence[float], labels: Sequence[str]) -> None:
    """Raises UserError for weights that are not one for each label."""
    if weights and len(weights) != len(labels):
        raise UserError(
            f"objective.{field}: {len(weights)} weights for {len(labels)} labels; write one for "
            "each, in the order of objective.labels"
        )


def judged_classes(
    model: Model,
    aux: Aux,
    logits: Array,
    real: Array,
    there: Array,
    weights: Sequence[float],
    smoothing: float,
) -> Judged:
    """Cross-entropy of classes `real` int32 [B, N], summed over those that are `there` [B, N], for
    logits [B, N, K] of a model whose layers returned `aux`; each is given its likeliest class.

    `weights` are of the K classes, or empty. The metric `nll` has neither weights nor smoothing.
    """
    chosen = jnp.take_along_axis(logits, real[..., None], axis=-1)[..., 0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)  # [B, N]
    nll, count = jnp.sum((normalizer - chosen) * there), jnp.sum(there)
    given = jnp.argmax(logits, axis=-1)
    metrics = {"nll": (nll, count), "accuracy": (jnp.sum((given == real) * there), count)}
    total, weight = nll, count
    if weights:
        weight_of = jnp.asarray(weights)[real] * there  # [B, N]
        total, weight = jnp.sum((normalizer - chosen) * weight_of), jnp.sum(weight_of)
    if smoothing:
        each = normalizer[..., None] - logits  # [B, N, K]
        every = jnp.mean(each * jnp.asarray(weights) if weights else each, axis=-1)
        total = (1 - smoothing) * total + smoothing * jnp.sum(every * there)
    return Judged(with_penalties(Loss(total, weight, metrics), model, aux), real, given, there)
