"""dot: the one place where activations meet a weight.

Sums run in float32 whatever the operands are, and the result has the activations' dtype
(or `out_dtype`). How a platform likes its matmuls is decided here and nowhere else; the
choice falls when a program is lowered, so that compiling for another machine is right.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from podsmith.core import cpu
from podsmith.core.param import Tree
from podsmith.core.sharding import batch_ways

Weight = Array  # quantized and low-rank leaves join here

# what rematerialization policies know the results by
MATMUL = "dot"
WIDE_MATMUL = "dot to mlp"  # the largest of a block, and cheap to compute again
GATE = "gate"  # as wide as they are

# where gradients are scattered by an all-to-all
TORUS = ("TPU v4", "TPU v5", "TPU v5p")  # whose links run one by themselves
MOST_SCATTERED = 16  # devices; beyond, its way is too long


def kept(x: Array, name: str = MATMUL) -> Array:
    """`x`, named for rematerialization policies."""
    return checkpoint_name(x, name)


def dot(
    eqn: str, x: Array, w: Weight, *, out_dtype: jnp.dtype | None = None, name: str | None = None
) -> Array:
    """einsum of activations with a weight, e.g. `dot("btd,dnh->btnh", x, w)`.

    The weight is cast to the dtype of `x`; letters are the package's legend. `name` is what
    rematerialization policies know the result by, if not by its width.
    """
    out = _dot(eqn, x, w.astype(x.dtype)).astype(out_dtype or x.dtype)
    return kept(out, name or (WIDE_MATMUL if eqn.endswith("f") else MATMUL))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(eqn: str, x: Array, w: Array) -> Array:
    return lax.platform_dependent(x, w, cpu=partial(cpu.einsum, eqn), default=partial(_einsum, eqn))


def _dot_fwd(eqn: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(eqn, x, w), (x, w)


def _dot_bwd(eqn: str, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    g = g.astype(x.dtype)
    x_letters, w_letters, out = cpu.letters(eqn)
    dx = _dot(f"{out},{w_letters}->{x_letters}", g, w)
    dw = lax.platform_dependent(
        x,
        g,
        cpu=partial(cpu.weight_gradient, eqn),
        default=partial(_weight_gradient, eqn),
    )
    return dx.astype(x.dtype), dw.astype(w.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _einsum(eqn: str, x: Array, w: Array) -> Array:
    return jnp.einsum(eqn, x, w, preferred_element_type=jnp.float32)


def _weight_gradient(eqn: str, x: Array, g: Array) -> Array:
    x_letters, w_letters, out = cpu.letters(eqn)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1 and x_letters[0] == "b" and "d" in w_letters:
        device = mesh.abstract_device
        if device and scatters(device.device_kind, mesh.shape, batch_ways(mesh)):
            return scattered_gradient(eqn, x, g, mesh.shape["fsdp"])
    return _einsum(f"{x_letters},{out}->{w_letters}", x, g)


def scatters(device_kind: str, sizes: Mapping[str, int], batch_ways: int) -> bool:
    """Whether gradients go to their shards by `scattered_gradient` on a mesh of these sizes:
    where rows are cut over `fsdp` alone and the way of an all-to-all is short."""
    alone = sizes["fsdp"] == batch_ways and sizes["context"] == 1
    return device_kind in TORUS and alone and 1 < sizes["fsdp"] <= MOST_SCATTERED


def scattered_gradient(eqn: str, x: Array, g: Array, ways: int) -> Array:
    """Gradient of the weight of `eqn` for activations whose rows are cut `ways` over `fsdp`.

    Each device's part of the sum goes to the devices that hold the shards (all-to-all), which
    add up in float32. An all-reduce, which is what TPU compilers make of it, moves twice the
    bytes and stops the arithmetic meanwhile.
    """
    x_letters, w_letters, out = cpu.letters(eqn)
    pin, rest = jax.lax.with_sharding_constraint, PartitionSpec.UNCONSTRAINED
    parts = [a.reshape(ways, -1, *a.shape[1:]) for a in (x, g)]  # [ways, B/ways, T, ...]
    parts = [pin(a, PartitionSpec("fsdp", *[rest] * (a.ndim - 1))) for a in parts]
    sums = _einsum(f"y{x_letters},y{out}->y{w_letters}", *parts).astype(x.dtype)
    sums = pin(sums, PartitionSpec("fsdp", *[rest] * len(w_letters)))
    held = ["fsdp" if letter == "d" else rest for letter in w_letters]
    sums = pin(sums, PartitionSpec(None, *held))
    return jnp.sum(sums.astype(jnp.float32), axis=0)


def lookup(table: Weight, ids: Array, dtype: jnp.dtype) -> Array:
    """Rows of an embedding table [V, D] for int ids [...]: [..., D] in `dtype`."""
    return jnp.take(table, ids, axis=0).astype(dtype)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves, abstract or real."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
