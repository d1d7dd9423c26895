"""Products of 8-bit floats, with weights that are trained in float32 (https://arxiv.org/abs/2209.05433).

    y  = x w      activations and weight in e4m3: 3 bits of mantissa, up to 448
    dx = g w      gradients of results in e5m2: 2 bits of mantissa, up to 57,344
    dw = x g

Each array is scaled so that its largest value is the format's, by one factor that is taken anew
from it ("current scaling"). Sums are float32. Only GPUs from compute capability 8.9 on multiply
these formats; CPUs compute the same from float32 operands.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.leaves import Float8
from lmwright.core.param import letters
from lmwright.core.sharding import by_platform
from lmwright.core.weight import name_result

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scaled(NamedTuple):
    """Values in 8 bits and the float32 factor that they are to be multiplied by."""

    values: Array
    factor: Array


def product(eqn: str, x: Array, w: Float8, narrow: None = None) -> Array:
    """Product with the weight in 8 bits, in the dtype of `x`."""
    return _product(eqn, x, w.latent)


def widened(w: Float8) -> Array:
    """The float32 weight."""
    return w.latent


def scaled(a: Array, dtype: Any) -> Scaled:
    """`a` in an 8-bit format, rounded to nearest."""
    # the factor is kept for the backward pass, which need not look for the largest value again
    largest = name_result(jnp.max(jnp.abs(a)).astype(jnp.float32))
    most, least = float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).tiny)
    factor = jnp.where(largest > most * least, largest / most, 1.0)  # a factor of 0 would give NaN
    return Scaled((a.astype(jnp.float32) / factor).astype(dtype), factor)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(eqn: str, x: Array, w: Array) -> Array:
    return _forward(eqn, x, w)[0]


def _forward(eqn: str, x: Array, w: Array) -> tuple[Array, tuple[Scaled, Scaled]]:
    a, b = scaled(x, FORWARD), scaled(w, FORWARD)
    return _multiplied(eqn, a, b).astype(x.dtype), (a, b)


def _backward(eqn: str, residuals: tuple[Scaled, Scaled], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    x_letters, w_letters, out = letters(eqn)
    change = scaled(g, BACKWARD)
    dx = _multiplied(f"{out},{w_letters}->{x_letters}", change, w)
    return dx.astype(g.dtype), _multiplied(f"{x_letters},{out}->{w_letters}", x, change)


_product.defvjp(_forward, _backward)


def _multiplied(eqn: str, a: Scaled, b: Scaled) -> Array:
    """float32 product."""
    whole = lambda x, y: jnp.einsum(eqn, x, y, preferred_element_type=jnp.float32)  # noqa: E731
    on_cpu = lambda x, y: whole(x.astype(jnp.float32), y.astype(jnp.float32))  # noqa: E731
    return by_platform(a.values, b.values, cpu=on_cpu, default=whole) * (a.factor * b.factor)
