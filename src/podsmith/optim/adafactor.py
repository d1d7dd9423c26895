"""Adafactor (https://arxiv.org/abs/1804.04235): second moments of a matrix as row times column.

    g*g [batch, in, out] --mean over out--> row [batch, in]  \\
                         --mean over in---> col [batch, out]  >  row * col / mean(row)

The arrow says which axes are in and out, and each matrix of a stack is treated by itself.
"""

import jax.numpy as jnp
from jax import Array

from podsmith.core.param import Param
from podsmith.optim.kinds import Adafactor
from podsmith.optim.rule import Slot, Slots, like, slot


def slots(optim: Adafactor, param: Param) -> dict[str, Slot]:
    """Row and column means of a matrix, the full second moment of anything else."""
    if not param.is_matrix:
        return {"nu": like(param)}
    b, i = len(param.batch), len(param.inputs)
    return {
        "row": slot(param.batch + param.inputs, param.shape[: b + i]),
        "col": slot(param.batch + param.outputs, param.shape[:b] + param.shape[b + i :]),
    }


def direction(
    optim: Adafactor, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """The gradient over its root mean square, clipped and, if relative, scaled by the weight."""
    new = t**-optim.decay_exponent  # share of this step's squares
    square = g * g + optim.eps
    if param.is_matrix:
        step, kept = _factored(param, g, square, slots, new)
    else:
        nu = (1 - new) * slots["nu"] + new * square
        step, kept = g / jnp.sqrt(nu), {"nu": nu}
    step = step / jnp.maximum(1, _rms(param, step) / optim.update_rms)
    if optim.step_size == "relative":
        step = step * jnp.maximum(_rms(param, w), optim.min_weight_rms)
    return step, kept


def _factored(
    param: Param, g: Array, square: Array, slots: Slots, new: Array
) -> tuple[Array, dict[str, Array]]:
    b, i, n = len(param.batch), len(param.inputs), len(param.shape)
    ins, outs = tuple(range(b, b + i)), tuple(range(b + i, n))
    row = (1 - new) * slots["row"] + new * square.mean(outs)
    col = (1 - new) * slots["col"] + new * square.mean(ins)
    relative = row / row.mean(ins, keepdims=True)  # in `row` the inputs are the same axes
    # two roots, not the root of a product: squares of small gradients would underflow
    step = g * jnp.expand_dims(relative, outs) ** -0.5 * jnp.expand_dims(col, ins) ** -0.5
    return step, {"row": row, "col": col}


def _rms(param: Param, x: Array) -> Array:
    """Root mean square of each member of a stack, [batch, 1, ...]."""
    axes = tuple(range(len(param.batch), x.ndim))
    return jnp.sqrt(jnp.mean(x * x, axes, keepdims=True))
