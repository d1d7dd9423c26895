"""SwiGLU as gpt-oss has it (https://arxiv.org/abs/2508.10925): both inputs within a limit, a
steeper sigmoid, and 1 added to the second."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.weight import cpu_barrier

SwigluOai = Literal["swiglu_oai"]
LIMIT, STEEPNESS = 7.0, 1.702


def _computed(gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(STEEPNESS * gate) * (up + 1)


@jax.custom_vjp
def swiglu_oai(gate: Array, up: Array) -> Array:
    """The input of the second projection, of any shape. The backward pass keeps only the two
    inputs, as `nn.mlp.gated` does."""
    return _computed(gate, up)


def _forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return _computed(gate, up), (gate, up)


def _backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    return jax.vjp(_computed, *cpu_barrier(*residuals))[1](g)


swiglu_oai.defvjp(_forward, _backward)
