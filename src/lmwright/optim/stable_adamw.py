"""StableAdamW (https://arxiv.org/abs/2304.13013): AdamW whose rate is divided, tensor by tensor, by
the root mean square of gradient over second moment where that is above one."""

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim import adamw
from lmwright.optim.other_kinds import StableAdamW
from lmwright.optim.rule import Slot, Slots, unbias


def slots(optim: StableAdamW, param: Param) -> dict[str, Slot]:
    """AdamW's two moments."""
    return adamw.slots(optim, param)


def direction(
    optim: StableAdamW, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """AdamW's direction over max(1, rms), for each matrix of a stack; the decay that `build` adds
    is divided likewise."""
    step, new = adamw.direction(optim, param, g, w, slots, t)
    nu = new["nu"] / unbias(optim.beta2, t)
    square = g * g / jnp.maximum(nu, optim.eps**2)
    own = tuple(range(len(param.batch), g.ndim))  # axes of one tensor
    share = 1 / jnp.maximum(1.0, jnp.sqrt(jnp.mean(square, axis=own, keepdims=True)))
    if param.is_matrix:  # the decay is a number of this step, and may be traced
        step += optim.weight_decay * w
        return share * step - optim.weight_decay * w, new
    return share * step, new
