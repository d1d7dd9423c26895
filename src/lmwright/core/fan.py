"""The products of `core.fanout` under tensor parallelism, where every device computes a part of
each gradient of the input. It adds its parts up before they travel to the devices that hold the
tokens; left to itself, the partitioner sends each one alone:

    dx = reduce_scatter(g_q w_q' + g_k w_k' + g_v w_v')
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from lmwright.core.param import letters
from lmwright.core.sharding import ACTIVATIONS, constrain, partition
from lmwright.core.weight import product, untyped_dot, weight_gradient

AXIS = "tensor"
NAMES = {
    "b": "batch", "t": "seq", "d": "embed", "n": "heads", "k": "kv_heads", "h": "head_dim",
    "e": "experts", "f": "mlp", "g": "gate_up", "p": "qkv",
}  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fan(eqns: tuple[str, ...], x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    """Products of x [B, T, D], cut along tokens, with weights in its dtype."""
    x = _gathered(x)
    return tuple(untyped_dot(eqn, x.dtype, x, w) for eqn, w in zip(eqns, weights, strict=True))


def _fan_fwd(eqns: tuple[str, ...], x: Array, weights: tuple[Array, ...]):
    return fan(eqns, x, weights), (x, weights)


def _fan_bwd(
    eqns: tuple[str, ...], residuals: tuple[Array, tuple[Array, ...]], gs: tuple[Array, ...]
):
    # one gather with the forward pass, where that runs again
    x, weights = _gathered(residuals[0]), residuals[1]
    gradients = tuple(
        weight_gradient(eqn, x, g, w.dtype) for eqn, g, w in zip(eqns, gs, weights, strict=True)
    )
    return _input_gradient(eqns, gs, weights), gradients


fan.defvjp(_fan_fwd, _fan_bwd)


def _gathered(x: Array) -> Array:
    return constrain(x, "batch seq embed")


def _input_gradient(
    eqns: tuple[str, ...], gs: tuple[Array, ...], weights: tuple[Array, ...]
) -> Array:
    """[B, T, D], cut along tokens as the residual stream is."""
    sides = [letters(eqn) for eqn in eqns]

    def local(gs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        parts = [
            product(f"{out},{w_letters}->{x_letters}", g, w)
            for (x_letters, w_letters, out), g, w in zip(sides, gs, weights, strict=True)
        ]
        total = reduce(jnp.add, parts).astype(gs[0].dtype)
        return lax.psum_scatter(total, AXIS, scatter_dimension=1, tiled=True)

    return jax.shard_map(
        local,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(
            tuple(_spec(out) for _, _, out in sides),
            tuple(_spec(w_letters) for _, w_letters, _ in sides),
        ),
        out_specs=partition(("batch", "stream", "embed"), ACTIVATIONS),
        check_vma=False,
    )(gs, weights)


def _spec(axes: str) -> PartitionSpec:
    return partition(tuple(NAMES[letter] for letter in axes), ACTIVATIONS)
