"""Loss: the result of an objective, as sums and weights, never means, so that accumulation, packing
and uneven hosts are exact."""

from typing import Any, NamedTuple

from jax import Array

from lmwright.core.stack import Aux
from lmwright.models.decoder import penalties


class Loss(NamedTuple):
    """float32 scalars. The gradient is that of `total`; the loss is total over weight."""

    total: Array
    weight: Array
    metrics: dict[str, tuple[Array, Array]]


def for_eval(objective: Any) -> Any:
    """The objective as it is measured: without the noise that some add in training."""
    without_noise = getattr(objective, "without_noise", None)
    return without_noise() if without_noise else objective


def learns_from(objective: Any) -> str:
    """What a store must hold for it (`TokenStore.holds`)."""
    return getattr(objective, "learns_from", "texts")


def with_penalties(loss: Loss, model: Any, aux: Aux) -> Loss:
    """The loss with what the model's layers add to that of each token, and their metrics; `aux`
    is what `model.hidden` returned beside the residual stream."""
    added, metrics = penalties(model, aux)
    return Loss(loss.total + added * loss.weight, loss.weight, loss.metrics | metrics)
