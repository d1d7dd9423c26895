"""Saves: block inputs that are kept for the backward pass in fewer bits.

    forward      y = block(w, x)        x --pack--> kept until the backward pass
    backward     kept --unpack--> x' --> block computed again --> gradients at x'

The forward pass is not changed by a bit. Gradients are, since what is computed again starts from
x', which is close to x: within half a step of its group's integers. A group is 64 neighbors along
D, with a scale of its own: channels of the residual stream differ by orders of magnitude, and
scales along tokens are far worse (`benchmarks/gradient_error.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import SCALED_TOGETHER
from lmwright.core.compute import BLOCK_INPUT, Block, Remat

OUTLIERS = 8  # channels of a row that int8 keeps as they are
ROUNDING = 1 + 2**-8  # so that a scale in bfloat16 is never below the one that was asked for

Packed = tuple[Array, ...]


class Format:
    """Format in which block inputs [B, T, D] are kept; D is a multiple of `SCALED_TOGETHER`."""

    def bits(self, seq_len: int, embed_dim: int) -> float:
        """Bits per value, scales included."""
        raise NotImplementedError

    def pack(self, x: Array) -> Packed:
        """Arrays that are kept of x [B, T, D]."""
        raise NotImplementedError

    def unpack(self, packed: Packed) -> Array:
        """float32 [B, T, D], close to what was packed."""
        raise NotImplementedError

    def around(self, remat: Remat, block: Block, place: int, prevent_cse: bool) -> Block:
        """`block` under a policy of rematerialization, whose backward pass reads argument number
        `place` from what is kept of it, on the host if the policy says so. What else it reads is
        as the policy has it."""
        on_host = BLOCK_INPUT in remat.offloaded
        rest = replace(remat, format=None, offloaded=remat.offloaded - {BLOCK_INPUT})
        block = rest.apply(block, prevent_cse=prevent_cse)

        @jax.custom_vjp
        def run(*args: Any) -> Any:
            return block(*args)

        def forward(*args: Any) -> Any:
            out, pull_back = jax.vjp(block, *args)
            leaves, tree = jax.tree.flatten(pull_back)
            x = args[place]
            at = tuple(number for number, leaf in enumerate(leaves) if leaf is x)
            packed = self.pack(x) if at else ()
            if on_host:
                packed = jax.device_put(packed, jax.memory.Space.Host)
            return out, (packed, [a for a in leaves if a is not x], _Places(tree, at, x.dtype))

        def backward(kept: Any, g: Any) -> Any:
            packed, rest, places = kept
            if on_host:
                packed = jax.device_put(packed, jax.memory.Space.Device)
            return places.joined(self.unpack(packed) if packed else None, rest)(g)

        run.defvjp(forward, backward)
        return run


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("tree", "at", "dtype"))
@dataclass(frozen=True)
class _Places:
    """Positions of the unpacked array among what a backward pass reads."""

    tree: Any
    at: tuple[int, ...]
    dtype: Any

    def joined(self, x: Array | None, rest: Sequence[Array]) -> Any:
        """The function that takes gradients of results to those of arguments."""
        x, others = None if x is None else x.astype(self.dtype), iter(rest)
        count = len(rest) + len(self.at)
        leaves = [x if number in self.at else next(others) for number in range(count)]
        return jax.tree.unflatten(self.tree, leaves)


def integers(x: Array, largest: int) -> tuple[Array, Array]:
    """int32 [B, T, D] within `largest` and bfloat16 scales, one for SCALED_TOGETHER values
    along D, whose product is x."""
    wide = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide.reshape(*x.shape[:-1], -1, SCALED_TOGETHER)), axis=-1)
    # a compiler may leave out a cast to bfloat16 and back, but not this
    scale = jax.lax.reduce_precision(peak * (ROUNDING / largest), 8, 7).astype(jnp.bfloat16)
    steps = wide / repeated(jnp.where(scale == 0, 1, scale))
    return jnp.round(steps).astype(jnp.int32), scale


def scaled(values: Array, scale: Array) -> Array:
    """float32 [B, T, D]: the inverse of `integers`."""
    return values.astype(jnp.float32) * repeated(scale)


def repeated(scale: Array) -> Array:
    """float32 [B, T, D] of scales, each repeated SCALED_TOGETHER times along D. By a product whose
    sums have one term: to repeat along lanes, TPUs would store both the scales and the result."""
    ones = jnp.repeat(jnp.eye(scale.shape[-1], dtype=scale.dtype), SCALED_TOGETHER, axis=1)
    return jnp.einsum("btg,gd->btd", scale, ones, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Int12(Format):
    """12-bit integers, two in three bytes."""

    largest: ClassVar[int] = 2**11 - 1

    def bits(self, seq_len: int, embed_dim: int) -> float:
        return 12 + 16 / SCALED_TOGETHER

    def pack(self, x: Array) -> Packed:
        """uint8 [B, T, D] of low bytes, uint8 [B, T, D / 2] of two high halves each, scales."""
        values, scale = integers(x, self.largest)
        first, second = jnp.split((values >> 8) & 15, 2, axis=-1)
        high = first | (second << 4)
        return (values & 255).astype(jnp.uint8), high.astype(jnp.uint8), scale

    def unpack(self, packed: Packed) -> Array:
        low, high, scale = packed
        high = high.astype(jnp.int32)
        values = low.astype(jnp.int32) | jnp.concatenate([high & 15, high >> 4], axis=-1) << 8
        return scaled((values ^ 2048) - 2048, scale)  # the twelfth bit is the sign


@dataclass(frozen=True)
class Int8(Format):
    """8-bit integers; the channels of a row with the largest values are kept apart in bfloat16."""

    largest: ClassVar[int] = 2**7 - 1

    def bits(self, seq_len: int, embed_dim: int) -> float:
        return 8 + 16 / SCALED_TOGETHER + OUTLIERS * (16 / embed_dim + 32 / embed_dim / seq_len)

    def pack(self, x: Array) -> Packed:
        """int8 [B, T, D], scales, bfloat16 [B, T, OUTLIERS], and int32 [B, OUTLIERS]: which."""
        _, which = jax.lax.top_k(jnp.max(jnp.abs(x), axis=1), OUTLIERS)
        here = chosen(which, x.shape[-1], x.dtype)
        # as products, which a TPU takes faster than it gathers; each sum has one term
        apart = jnp.einsum("btd,bed->bte", x, here).astype(jnp.bfloat16)
        values, scale = integers(jnp.where(jnp.any(here, axis=1)[:, None], 0, x), self.largest)
        return values.astype(jnp.int8), scale, apart, which

    def unpack(self, packed: Packed) -> Array:
        values, scale, apart, which = packed
        here = chosen(which, values.shape[-1], apart.dtype)
        there = jnp.einsum("bte,bed->btd", apart, here, preferred_element_type=jnp.float32)
        return jnp.where(jnp.any(here, axis=1)[:, None], there, scaled(values, scale))


def chosen(which: Array, size: int, dtype: Any) -> Array:
    """[B, E, D] of ones at the channels `which` [B, E] and zeros elsewhere."""
    return jax.nn.one_hot(which, size, dtype=dtype)


INT12, INT8 = Int12(), Int8()
