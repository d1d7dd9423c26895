"""Adam with 8-bit moments, block by block (https://arxiv.org/abs/2110.02861).

    moment [..., n] --blocks--> [..., n/b, b] --> codes [..., n] (8 bits) and scale [..., n/b]

A block lies within the last axis, so the leading axes shard as the weight's do. The code is
a power: code c stands for scale * (c / max)**4, finer towards zero like the paper's dynamic
tree, but two multiplications or two square roots where that one looks up a table. A scale is
the running mean of the block's greatest gradient (squared for the second moment): it bounds
the moment, and is known before it, so that moments are never held in float32. As in the
paper, weights that are no matrices keep float32 moments; rounding is to the nearest code.
"""

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim import adamw
from lmwright.optim.kinds import Adam8bit
from lmwright.optim.rule import Slot, Slots, like, slot

LEAST_SPLIT, MOST = 1024, 2048  # elements; the paper's block has 2048


def block_size(size: int) -> int:
    """Number of elements of a block on an axis of `size`: all of them up to 2048.

    Of a longer axis a divisor, where one is in range: the one that leaves the highest power
    of two as number of blocks, so that blocks end where shards of the axis do.
    """
    if size <= MOST:
        return size
    fits = [b for b in range(LEAST_SPLIT, MOST + 1) if size % b == 0]
    return max(fits, key=lambda b: ((size // b) & -(size // b), b), default=MOST)


def slots(optim: Adam8bit, param: Param) -> dict[str, Slot]:
    """Codes of the shape of the weight and scales of its blocks; float32 moments unless the weight
    is a matrix."""
    if not param.is_matrix:
        return adamw.slots(optim, param)
    size = param.shape[-1]
    blocks = -(-size // block_size(size))
    scale = slot((*param.axes[:-1], "blocks"), (*param.shape[:-1], blocks))
    return {
        "mu_codes": like(param, "int8"),
        "mu_scale": scale,
        "nu_codes": like(param, "uint8"),
        "nu_scale": scale,
    }


def direction(
    optim: Adam8bit, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """AdamW's step from decoded moments, which are encoded again afterwards."""
    if not param.is_matrix:
        return adamw.direction(optim, param, g, w, slots, t)
    moments = {name: decode(slots[f"{name}_codes"], slots[f"{name}_scale"]) for name in _CODES}
    step, moments = adamw.direction(optim, param, g, w, moments, t)
    top = _split(jnp.abs(g)).max(-1)  # [..., blocks]
    scales = {
        "mu": optim.beta1 * slots["mu_scale"] + (1 - optim.beta1) * top,
        "nu": optim.beta2 * slots["nu_scale"] + (1 - optim.beta2) * top * top,
    }
    new_slots = {f"{name}_scale": scale for name, scale in scales.items()}
    for name, dtype in _CODES.items():
        new_slots[f"{name}_codes"] = encode(moments[name], scales[name], dtype)
    return step, new_slots


_CODES = {"mu": jnp.int8, "nu": jnp.uint8}


def encode(x: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Codes [..., n] of x [..., n] float32, whose blocks are at most scale [..., blocks].

    int8 has a sign; uint8 is for what is never negative, and has no code 0: a second moment
    rounded to nothing would turn its first moment into an endless step.
    """
    blocks = _split(x)  # [..., blocks, b]
    share = jnp.abs(blocks) * (1 / jnp.where(scale > 0, scale, 1))[..., None]
    code = jnp.round(jnp.iinfo(dtype).max * jnp.sqrt(jnp.sqrt(jnp.minimum(share, 1))))
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        code = jnp.maximum(code, 1)
    else:
        code = jnp.where(blocks < 0, -code, code)
    return _join(code, x.shape[-1]).astype(dtype)


def decode(codes: Array, scale: Array) -> Array:
    """float32 [..., n] of codes [..., n] and scales [..., blocks]."""
    share = _split(codes.astype(jnp.float32) * (1 / jnp.iinfo(codes.dtype).max))
    square = share * share
    return _join(jnp.sign(share) * square * square * scale[..., None], codes.shape[-1])


def _split(x: Array) -> Array:
    """Array [..., n] as [..., blocks, b], padded with zeros if b does not divide n."""
    size = x.shape[-1]
    block = block_size(size)
    if size % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % block)])
    return x.reshape(*x.shape[:-1], -1, block)


def _join(blocks: Array, size: int) -> Array:
    """Array [..., blocks, b] as [..., n], without the padding."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :size]
