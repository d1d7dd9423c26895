"""Lion (https://arxiv.org/abs/2302.06675): the sign of momentum mixed with the gradient."""

import jax.numpy as jnp
from jax import Array

from podsmith.core.param import Param
from podsmith.optim.kinds import Lion
from podsmith.optim.rule import Slot, Slots, like


def slots(optim: Lion, param: Param) -> dict[str, Slot]:
    """Momentum, float32, of the weight's shape."""
    return {"mu": like(param)}


def direction(
    optim: Lion, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """-1, 0 or 1 for each weight; the momentum is updated after it was used."""
    mu = slots["mu"]
    step = jnp.sign(optim.beta1 * mu + (1 - optim.beta1) * g)
    return step, {"mu": optim.beta2 * mu + (1 - optim.beta2) * g}
