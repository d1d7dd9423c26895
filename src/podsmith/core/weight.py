"""dot: the one place where activations meet a weight.

Sums run in float32 whatever the operands are, and the result has the activations' dtype
(or `out_dtype`). How a platform likes its matmuls is decided here and nowhere else; the
choice falls when a program is lowered, so that compiling for another machine is right.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from podsmith.core import cpu
from podsmith.core.param import Tree

Weight = Array  # quantized and low-rank leaves join here

# what rematerialization policies know the results by
MATMUL = "dot"
WIDE_MATMUL = "dot to mlp"  # the largest of a block, and cheap to compute again


def dot(eqn: str, x: Array, w: Weight, *, out_dtype: jnp.dtype | None = None) -> Array:
    """einsum of activations with a weight, e.g. `dot("btd,dnh->btnh", x, w)`.

    The weight is cast to the dtype of `x`; letters are the package's legend.
    """
    out = _dot(eqn, x, w.astype(x.dtype)).astype(out_dtype or x.dtype)
    return checkpoint_name(out, WIDE_MATMUL if eqn.endswith("f") else MATMUL)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(eqn: str, x: Array, w: Array) -> Array:
    return lax.platform_dependent(x, w, cpu=partial(cpu.einsum, eqn), default=partial(_einsum, eqn))


def _dot_fwd(eqn: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(eqn, x, w), (x, w)


def _dot_bwd(eqn: str, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    g = g.astype(x.dtype)
    inputs, out = eqn.split("->")
    x_letters, w_letters = inputs.split(",")
    dx = _dot(f"{out},{w_letters}->{x_letters}", g, w)
    dw = lax.platform_dependent(
        x,
        g,
        cpu=partial(cpu.weight_gradient, eqn),
        default=partial(_einsum, f"{x_letters},{out}->{w_letters}"),
    )
    return dx.astype(x.dtype), dw.astype(w.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _einsum(eqn: str, x: Array, w: Array) -> Array:
    return jnp.einsum(eqn, x, w, preferred_element_type=jnp.float32)


def lookup(table: Weight, ids: Array, dtype: jnp.dtype) -> Array:
    """Rows of an embedding table [V, D] for int ids [...]: [..., D] in `dtype`."""
    return jnp.take(table, ids, axis=0).astype(dtype)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves, abstract or real."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
