"""AdamW (https://arxiv.org/abs/1711.05101): one pass over gradient, weight and two moments."""

from typing import TYPE_CHECKING, Union

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim.kinds import Adam
from lmwright.optim.rule import Slot, Slots, like, unbias

if TYPE_CHECKING:
    from lmwright.optim.other_kinds import Muon


def slots(optim: Union[Adam, "Muon"], param: Param) -> dict[str, Slot]:
    """First and second moments, float32, of the shape of the weight."""
    return {"mu": like(param), "nu": like(param)}


def direction(
    optim: Union[Adam, "Muon"], param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """Bias-corrected mean over the root of the bias-corrected mean square."""
    mu = optim.beta1 * slots["mu"] + (1 - optim.beta1) * g
    nu = optim.beta2 * slots["nu"] + (1 - optim.beta2) * g * g
    # scalars first: the two divisions happen once, not for each weight
    root = jnp.sqrt(nu) * unbias(optim.beta2, t) ** -0.5
    step = mu * (1 / unbias(optim.beta1, t)) / (root + optim.eps)
    return step, {"mu": mu, "nu": nu}
