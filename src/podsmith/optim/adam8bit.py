"""Adam with 8-bit moments, block by block (https://arxiv.org/abs/2110.02861).

    moment [..., n] --blocks--> [..., n/b, b] --> codes [..., n] (8 bits) and scale [..., n/b]

A block lies within the last axis, so the leading axes shard as the weight's do. The code is
a power: code c stands for scale * (c / max)**4, finer towards zero like the paper's dynamic
tree, but two multiplications or two square roots where that one looks up a table. As there,
weights that are no matrices keep float32 moments. Rounding is to the nearest code.
"""

import jax.numpy as jnp
from jax import Array

from podsmith.core.param import Param
from podsmith.optim import adamw
from podsmith.optim.kinds import Adam8bit
from podsmith.optim.rule import Slot, Slots, like, slot

MIN_BLOCK, MAX_BLOCK, PADDED_BLOCK = 96, 256, 128


def block_size(size: int) -> int:
    """Elements of a block on an axis of `size`.

    A divisor where there is one in range, the one that leaves the highest power of two as
    number of blocks: then blocks end where shards of the axis do.
    """
    if size < MIN_BLOCK:
        return size
    fits = [b for b in range(MIN_BLOCK, MAX_BLOCK + 1) if size % b == 0]
    if fits:
        return max(fits, key=lambda b: ((size // b) & -(size // b), b))
    return size if size <= MAX_BLOCK else PADDED_BLOCK


def slots(optim: Adam8bit, param: Param) -> dict[str, Slot]:
    """Codes of the weight's shape and scales of its blocks; float32 moments if no matrix."""
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
    """AdamW's step from moments that are decoded and encoded again."""
    if not param.is_matrix:
        return adamw.direction(optim, param, g, w, slots, t)
    moments = {name: decode(slots[f"{name}_codes"], slots[f"{name}_scale"]) for name in _CODES}
    step, moments = adamw.direction(optim, param, g, w, moments, t)
    kept = {}
    for name, dtype in _CODES.items():
        kept[f"{name}_codes"], kept[f"{name}_scale"] = encode(moments[name], dtype)
    return step, kept


_CODES = {"mu": jnp.int8, "nu": jnp.uint8}


def encode(x: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Codes [..., n] (int8, or uint8 for values that are never negative) and scales
    [..., blocks] (float32) of x [..., n].

    What is not zero never becomes code 0 of a uint8: a second moment that vanished would
    turn its first moment into an endless step.
    """
    blocks = _split(x)  # [..., n/b, b]
    size = jnp.abs(blocks)
    scale = size.max(-1)
    share = size / jnp.where(scale > 0, scale, 1)[..., None]
    code = jnp.round(jnp.iinfo(dtype).max * jnp.sqrt(jnp.sqrt(share)))
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        code = jnp.maximum(code, 1)
    else:
        code = jnp.where(blocks < 0, -code, code)
    return _join(code, x.shape[-1]).astype(dtype), scale


def decode(codes: Array, scale: Array) -> Array:
    """float32 [..., n] of codes [..., n] and scales [..., blocks]."""
    share = _split(codes.astype(jnp.float32) / jnp.iinfo(codes.dtype).max)
    square = share * share
    return _join(jnp.sign(share) * square * square * scale[..., None], codes.shape[-1])


def _split(x: Array) -> Array:
    """[..., n] to [..., blocks, b], zeros added where b does not divide n."""
    size = x.shape[-1]
    block = block_size(size)
    if size % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % block)])
    return x.reshape(*x.shape[:-1], -1, block)


def _join(blocks: Array, size: int) -> Array:
    """[..., blocks, b] to [..., n], padding cut off."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :size]
