"""Storage of a frozen matrix in fewer bits, as a leaf of `core.leaves`."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from lmwright.core.four_bits import in_blocks
from lmwright.core.leaves import Int4, Int8, Storage
from lmwright.core.param import Param

BLOCK = 32  # inputs that share a scale of Int4
# shares of the largest magnitude in a block that its scale is made for; the best one is taken
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between MXFP4's levels, doubled


def block_size(param: Param) -> int:
    """Inputs that share a scale of Int4: the most, up to BLOCK, that divide the last input."""
    size = param.shape[len(param.batch) + len(param.inputs) - 1]
    return next(n for n in range(min(BLOCK, size), 0, -1) if size % n == 0)


def stored_spec(param: Param, storage: Storage) -> Any:
    """The Param, or the leaf of Params, that a frozen matrix is stored as."""
    if storage in ("fp32", "bf16"):
        return param
    nb, ni = len(param.batch), len(param.inputs)
    sides = {"inputs": ni, "outputs": len(param.outputs)}
    if storage == "int8":
        arrow = f"[{' '.join(param.batch)}] {' '.join(param.outputs)}"
        scale = Param(arrow, param.shape[:nb] + param.shape[nb + ni :], fill=1.0)
        return Int8(param, scale, **sides)
    last = nb + ni - 1
    blocks = param.shape[last] // block_size(param)
    scale = Param(param.arrow, (*param.shape[:last], blocks, *param.shape[last + 1 :]), fill=1.0)
    return Int4(param, scale, **sides, mxfp4=storage == "mxfp4")


def quantize(w: Array, param: Param, storage: Storage) -> Any:
    """The array of `param` as it is stored; traceable."""
    if storage in ("fp32", "bf16"):
        return w.astype(jnp.float32 if storage == "fp32" else jnp.bfloat16)
    w = w.astype(jnp.float32)
    nb, ni = len(param.batch), len(param.inputs)
    sides = {"inputs": ni, "outputs": len(param.outputs)}
    if storage == "int8":
        axes = tuple(range(nb, nb + ni))
        top = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
        scale = jnp.where(top == 0, 1.0, top / 127)
        values = jnp.round(w / scale).astype(jnp.int8)
        return Int8(values, jnp.squeeze(scale, axes), **sides)
    last = nb + ni - 1
    blocks = in_blocks(w, last, block_size(param))
    is_mxfp4 = storage == "mxfp4"
    values, scale = (_mxfp4 if is_mxfp4 else _best_clip)(blocks, last + 1)
    values, scale = values.reshape(w.shape), jnp.squeeze(scale, last + 1)
    return Int4(values, scale, **sides, mxfp4=is_mxfp4)


def _mxfp4(blocks: Array, axis: int) -> tuple[Array, Array]:
    """int4 numbers of the nearest levels, and bfloat16 scales of half a level; exact for weights
    that were MXFP4."""
    top = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True)
    exponent = jnp.frexp(top)[1] - 4  # of the specification, which puts the largest at 4 to 8
    scale = jnp.where(top == 0, 1.0, jnp.ldexp(jnp.float32(1), exponent))
    size = jnp.abs(blocks) / scale
    number = sum((size > middle).astype(jnp.int32) for middle in MIDDLES)
    values = jnp.sign(blocks).astype(jnp.int32) * number
    return values.astype(jnp.int4), scale.astype(jnp.bfloat16)


def _best_clip(blocks: Array, axis: int) -> tuple[Array, Array]:
    """int4 values and bfloat16 scales of least squared error among CLIPS."""
    at = jnp.argmax(jnp.abs(blocks), axis=axis, keepdims=True)
    top = jnp.take_along_axis(blocks, at, axis=axis)
    best: tuple[Array, ...] = ()
    for clip in CLIPS:
        scale = (top * (clip / -8)).astype(jnp.bfloat16)
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
        wide = scale.astype(jnp.float32)
        values = jnp.clip(jnp.round(blocks / wide), -8, 7)
        error = jnp.sum(jnp.square(values * wide - blocks), axis=axis, keepdims=True)
        new: tuple[Array, ...] = (values, scale, error)
        if best:
            better = error < best[2]
            new = tuple(jnp.where(better, n, o) for n, o in zip(new, best, strict=True))
        best = new
    return best[0].astype(jnp.int4), best[1]
