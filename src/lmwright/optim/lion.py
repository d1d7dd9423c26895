"""Lion (https://arxiv.org/abs/2302.06675): the sign of momentum mixed with the gradient."""

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim.other_kinds import Lion
from lmwright.optim.rule import Slot, Slots, like


def slots(optim: Lion, param: Param) -> dict[str, Slot]:
    """Momentum, float32, of the weight's shape."""
    return {"mu": like(param)}


def direction(
    optim: Lion, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """Direction -1, 0 or 1 of each weight: sign(beta1 * mu + (1 - beta1) * g) with the momentum
    before this step, computed from the momentum after it so that the old one need not be kept."""
    mu = optim.beta2 * slots["mu"] + (1 - optim.beta2) * g
    ratio = optim.beta1 / optim.beta2
    return jnp.sign(ratio * mu + (1 - ratio) * g), {"mu": mu}
