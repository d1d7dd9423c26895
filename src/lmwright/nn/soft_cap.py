"""Soft caps of logits and gates (Gemma 2, xLSTM)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def soft_capped(logits: Array, cap: float) -> Array:
    """`cap * tanh(logits / cap)`, whose backward pass reads nothing but this result."""
    return cap * jnp.tanh(logits / cap)


def _soft_capped_fwd(logits: Array, cap: float) -> tuple[Array, Array]:
    # without a barrier, TPUs keep the logits too and take the tangent again
    capped = jax.lax.optimization_barrier(soft_capped(logits, cap))
    return capped, capped


def _soft_capped_bwd(cap: float, capped: Array, g: Array) -> tuple[Array]:
    return (g * (1 - jnp.square(capped / cap)),)


soft_capped.defvjp(_soft_capped_fwd, _soft_capped_bwd)
