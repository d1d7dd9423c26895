"""dot: the one place where activations meet a weight.

Sums run in float32 whatever the operands are, and the result has the activations' dtype
(or `out_dtype`). How a platform likes its matmuls is decided here and nowhere else.
"""

import jax.numpy as jnp
from jax import Array

from podsmith.core.param import Tree

Weight = Array  # quantized and low-rank leaves join here


def dot(eqn: str, x: Array, w: Weight, *, out_dtype: jnp.dtype | None = None) -> Array:
    """einsum of activations with a weight, e.g. `dot("btd,dnh->btnh", x, w)`.

    The weight is cast to the dtype of `x`; letters are the package's legend.
    """
    out = jnp.einsum(eqn, x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


def lookup(table: Weight, ids: Array, dtype: jnp.dtype) -> Array:
    """Rows of an embedding table [V, D] for int ids [...]: [..., D] in `dtype`."""
    return jnp.take(table, ids, axis=0).astype(dtype)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves, abstract or real."""
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
