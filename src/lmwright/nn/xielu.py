"""xIELU, an activation with two learned slopes (https://arxiv.org/abs/2411.13010).

x > 0     alpha_p x^2 + beta x
x <= 0    alpha_n (exp(x) - 1 - x) + beta x
"""

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.weight import cpu_barrier


@jax.custom_vjp
def xielu(x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """xIELU of x, any shape, computed in float32. `alpha_p` and `alpha_n`, one number each, are
    learned through a softplus; below zero exp takes at most `eps`. The backward pass keeps the
    inputs alone."""
    return _xielu(x, alpha_p, alpha_n, beta, eps)


def _xielu(x: Array, *numbers: Array) -> Array:
    alpha_p, alpha_n, beta, eps = (a.astype(jnp.float32) for a in numbers)
    beta, eps = jax.lax.stop_gradient((beta, eps))
    rising, falling = jax.nn.softplus(alpha_p), beta + jax.nn.softplus(alpha_n)
    wide = x.astype(jnp.float32)
    below = falling * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
    return (jnp.where(wide > 0, rising * jnp.square(wide), below) + beta * wide).astype(x.dtype)


def _xielu_fwd(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    return xielu(*inputs), inputs


def _xielu_bwd(inputs: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
    return jax.vjp(_xielu, *cpu_barrier(*inputs))[1](g)


xielu.defvjp(_xielu_fwd, _xielu_bwd)
