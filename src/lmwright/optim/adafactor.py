"""Adafactor (https://arxiv.org/abs/1804.04235): second moments of a matrix as row times column.

    g*g [batch, in, out] --mean over out--> row [batch, in]  \\
                         --mean over in---> col [batch, out]  >  row * col / mean(row)

The arrow says which axes are in and out, and each matrix of a stack is treated by itself.
"""

import math

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim.other_kinds import Adafactor
from lmwright.optim.rule import Slot, Slots, like, slot


def slots(optim: Adafactor, param: Param) -> dict[str, Slot]:
    """Row and column means of a matrix; the full second moment of any other weight."""
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
    """Gradient over its root mean square, clipped and, if relative, scaled by the weight."""
    new = t**-optim.decay_exponent  # share of this step's squares
    square = g * g
    if param.is_matrix:
        factors, new_slots = _factor(optim, param, square, slots, new)
    else:
        nu = (1 - new) * slots["nu"] + new * (square + optim.eps)
        factors, new_slots = (nu,), {"nu": nu}
    # from squares, not from the step itself, which is then never held between two passes
    rms = jnp.sqrt(_mean(param, math.prod((1 / f for f in factors), start=square)))
    scale = 1 / jnp.maximum(1, rms / optim.update_rms)
    if optim.step_size == "relative":
        scale = scale * jnp.maximum(jnp.sqrt(_mean(param, w * w)), optim.min_weight_rms)
    return math.prod((f**-0.5 for f in factors), start=scale * g), new_slots


def _factor(
    optim: Adafactor, param: Param, square: Array, slots: Slots, new: Array
) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """Two arrays whose broadcast product is the second moment, and the new slots."""
    b, i, n = len(param.batch), len(param.inputs), len(param.shape)
    ins, outs = tuple(range(b, b + i)), tuple(range(b + i, n))
    row = (1 - new) * slots["row"] + new * (square.mean(outs) + optim.eps)
    col = (1 - new) * slots["col"] + new * (square.mean(ins) + optim.eps)
    relative = row / row.mean(ins, keepdims=True)  # in `row` the inputs are the same axes
    return (jnp.expand_dims(relative, outs), jnp.expand_dims(col, ins)), {"row": row, "col": col}


def _mean(param: Param, x: Array) -> Array:
    """Mean of each member of a stack, [batch, 1, ...]."""
    return jnp.mean(x, tuple(range(len(param.batch), x.ndim)), keepdims=True)
