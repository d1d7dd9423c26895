"""ReLU before a frozen product: the backward pass needs the signs of its input alone.

x --relu--> h --frozen w--> y
signs of x, a bit each    --> kept in place of x by policies of rematerialization
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import MATMUL
from lmwright.core.weight import Weight, dot, name_result

SIGNS = 8  # of as many tokens in a byte


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def relu_dot(eqn: str, x: Array, w: Weight) -> Array:
    """`dot(eqn, relu(x), w)` for x [B, T, F]. Where `w` is frozen, the backward pass needs the
    signs of x alone, and policies of rematerialization keep them, one bit each, in place of x."""
    return dot(eqn, jax.nn.relu(x), w)


def _relu_dot_fwd(eqn: str, x: Any, w: Any) -> tuple[Array, tuple[Any, Any]]:
    frozen = not any(leaf.perturbed for leaf in jax.tree.leaves(w))
    x, w = jax.tree.map(lambda leaf: leaf.value, (x, w))
    if frozen and x.shape[1] % SIGNS == 0:
        return relu_dot(eqn, x, w), (name_result(signs(x), MATMUL), w)
    out, pull_back = jax.vjp(lambda x, w: dot(eqn, jax.nn.relu(x), w), x, w)
    return out, (None, pull_back)


def _relu_dot_bwd(eqn: str, residuals: tuple[Any, Any], g: Any) -> tuple[Any, Any]:
    bits, rest = residuals
    if not isinstance(g, Array):  # nothing reads the product
        return None, None
    if bits is None:
        return rest(g)
    positive = unpacked(bits)
    zeros = jnp.zeros(positive.shape, g.dtype)  # the product itself is not wanted
    back = jax.vjp(lambda h: dot(eqn, h, rest), zeros)[1](g)[0]
    return jnp.where(positive, back, 0), None


relu_dot.defvjp(_relu_dot_fwd, _relu_dot_bwd, symbolic_zeros=True)


def signs(x: Array) -> Array:
    """Signs uint8 [B, T / 8, F]: the bits of each byte say which of 8 neighbors in T are
    positive."""
    places = jnp.arange(SIGNS, dtype=jnp.uint8)[:, None]
    positive = (x > 0).reshape(x.shape[0], -1, SIGNS, x.shape[2])
    return jnp.sum(positive.astype(jnp.uint8) << places, axis=2, dtype=jnp.uint8)


def unpacked(bits: Array) -> Array:
    """bool [B, T, F]: the inverse of `signs`."""
    places = jnp.arange(SIGNS, dtype=jnp.uint8)[:, None]
    positive = (bits[:, :, None] >> places) & 1
    return positive.reshape(bits.shape[0], -1, bits.shape[2]).astype(bool)
