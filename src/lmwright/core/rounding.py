"""Grids that weights and activations are rounded to, each with its published formula.

ternary      s = mean |w| of a matrix, codes -1, 0, 1          https://arxiv.org/abs/2402.17764
int8_tokens  a = 127 / max |x| of a token, codes -128 ... 127  the same
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.sharding import by_platform

LEAST = 1e-5  # of a mean or largest magnitude
GROUP = 256  # values of a sum
EPS = 2.0**-23  # the least scale


def ternary(w: Array, dims: int) -> tuple[Array, Array]:
    """int8 codes of `w`, and the float32 scale of each matrix, which has the last `dims` axes."""
    w = w.astype(jnp.float32)
    axes = tuple(range(-dims, 0))
    # as transformers has it: what is rounded is multiplied by the inverse
    mean = by_platform(
        jnp.abs(w),
        tpu=lambda a: jnp.mean(a, axis=axes, keepdims=True),  # in 1,024 lanes
        default=lambda a: _mean(a, axes),
    )
    inverse = 1 / jnp.maximum(mean, LEAST)
    codes = jnp.clip(jnp.round(w * inverse), -1, 1).astype(jnp.int8)
    return codes, 1 / inverse


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """Mean along negative axes, which stay with size 1: one over at most GROUP values after the
    other, since a float32 sum over millions in a row loses most of its digits."""
    for axis in axes:
        at = x.ndim + axis
        while (size := x.shape[at]) > 1:
            group = next(n for n in range(min(size, GROUP), 0, -1) if size % n == 0)
            group = size if group == 1 else group  # a prime
            shape = (*x.shape[:at], size // group, group, *x.shape[at + 1 :])
            x = jnp.mean(x.reshape(shape), axis=at + 1)
    return x


def int8_tokens(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """int8 codes of `x`, and the float32 factor of each token, whose values are along `axes`."""
    x = x.astype(jnp.float32)
    factor = 127 / jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), LEAST)
    return jnp.clip(jnp.round(x * factor), -128, 127).astype(jnp.int8), factor


def _over(x: Array, number: float) -> Array:
    """`x / number`. XLA would multiply x by the inverse of the number, which gives other bits."""
    return x / (0 * x + number)


@dataclass(frozen=True)
class Grid:
    """Integers of a weight [*batch, inputs, *outputs], and how many inputs share a scale."""

    low: int
    high: int

    def scale(self, blocks: Array) -> tuple[Array, Array]:
        """(scale as it is stored, the inverse that codes are computed with), along axis -2."""
        top = jnp.max(jnp.abs(blocks), axis=-2, keepdims=True)
        scale = jnp.maximum(_over(top, (self.high - self.low) / 2), EPS)
        return scale, 1 / scale

    def whole(self, x: Array) -> Array:
        """The integers next to `x`, as floats: halves go to the even one."""
        return jnp.round(x)

    def stored(self, scale: Array) -> Array:
        """A trained scale as the file holds it."""
        return scale


class Q4_0(Grid):
    """GGUF's: the value of largest magnitude is -8, the scale a float16, halves go up."""

    def scale(self, blocks: Array) -> tuple[Array, Array]:
        """(scale, its inverse) of each block, as the gguf package has them: codes are computed with
        the scale before it is rounded."""
        at = jnp.argmax(jnp.abs(blocks), axis=-2, keepdims=True)
        scale = jnp.take_along_axis(blocks, at, axis=-2) / -8
        inverse = jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))
        return self.stored(scale), inverse

    def whole(self, x: Array) -> Array:
        """`trunc(x + 8.5) - 8`, of which only the clipped ones differ from the floor."""
        return jnp.trunc(x + 8.5) - 8

    def stored(self, scale: Array) -> Array:
        """The nearest float16."""
        return scale.astype(jnp.float16).astype(jnp.float32)


GRIDS = {"int4": Grid(-8, 7), "int8": Grid(-128, 127), "q4_0": Q4_0(-8, 7)}


def int8_shifted(x: Array, axes: tuple[int, ...], over: str | None = None) -> Array:
    """`x` rounded to 256 levels between the least and the largest value of each token, zero among
    them; float32, and the gradient of `x` passes. Inside a shard_map, `over` is the mesh axis that
    a token's values are cut over."""
    wide = x.astype(jnp.float32)
    fixed = lax.stop_gradient(wide)
    low = jnp.minimum(jnp.min(fixed, axis=axes, keepdims=True), 0)
    high = jnp.maximum(jnp.max(fixed, axis=axes, keepdims=True), 0)
    if over is not None:
        low, high = lax.pmin(low, over), lax.pmax(high, over)
    scale = jnp.maximum(_over(high - low, 255), EPS)
    zero = jnp.clip(-128 - jnp.round(low / scale), -128, 127)
    codes = jnp.round(fixed * (1 / scale)) + zero
    clipped = jnp.clip(codes, -128, 127)
    return straight(wide, (clipped - zero) * scale, codes == clipped)


@jax.custom_vjp
def straight(x: Array, rounded: Array, inside: Array) -> Array:
    """`rounded`, whose gradient goes to `x` where it is `inside` the grid."""
    return rounded


def _straight_fwd(x: Array, rounded: Array, inside: Array) -> tuple[Array, Array]:
    return rounded, inside


def _straight_bwd(inside: Array, g: Array) -> tuple[Array, Array, None]:
    return jnp.where(inside, g, 0), jnp.zeros_like(g), None


straight.defvjp(_straight_fwd, _straight_bwd)
