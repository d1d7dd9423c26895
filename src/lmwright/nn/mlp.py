"""Feed-forward activations, gated (https://arxiv.org/abs/2002.05202) and plain ones (squared ReLU:
https://arxiv.org/abs/2109.08668)."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.weight import cpu_barrier

PlainMlp = Literal["gelu_erf", "gelu_tanh", "relu", "relu2"]
GatedMlp = Literal["swiglu", "geglu", "geglu_erf", "reglu", "relu2glu"]
Mlp = Literal[GatedMlp, PlainMlp]
GATED = ("swiglu", "geglu", "geglu_erf", "reglu", "relu2glu")


def activate(kind: Mlp, gate: Array) -> Array:
    """The nonlinearity of `kind`, any shape; `geglu` has GELU's tanh form."""
    if kind == "swiglu":
        return jax.nn.silu(gate)
    if kind in ("geglu", "gelu_tanh"):
        return jax.nn.gelu(gate, approximate=True)
    if kind in ("geglu_erf", "gelu_erf"):
        x = gate.astype(jnp.float32)  # bfloat16 leaves 1 + erf few digits
        return (x * (0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5))).astype(gate.dtype)
    if kind in ("relu2", "relu2glu"):
        return jnp.square(jax.nn.relu(gate))
    return jax.nn.relu(gate)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(kind: Mlp, gate: Array, up: Array) -> Array:
    """activate(gate) * up. The backward pass keeps only the two inputs: taking the
    nonlinearity again is cheaper than storing its pieces."""
    return activate(kind, gate) * up


def _gated_fwd(kind: Mlp, gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return gated(kind, gate, up), (gate, up)


def _gated_bwd(kind: Mlp, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # CPUs would store the pieces of the forward pass; TPUs run it in another loop, and read the
    # two from their stacks at once where no barrier stands between
    residuals = cpu_barrier(*residuals)
    return jax.vjp(lambda gate, up: activate(kind, gate) * up, *residuals)[1](g)


gated.defvjp(_gated_fwd, _gated_bwd)
