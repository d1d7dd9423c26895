"""Check that arrays are free of NaN and infinities, for a whole tree at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def not_finite(tree: Any) -> str | None:
    """Path of the first leaf that holds a NaN or an infinity (`weights/embed`), or None.

    One reduction on the devices where the arrays lie; on several processes, of which each must
    ask, all get the same answer.
    """
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if not leaves:
        return None
    sharding = getattr(leaves[0][1], "sharding", None)
    whole = None
    if isinstance(sharding, NamedSharding):  # replicated, so that every process can read it
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    finite = jax.jit(_each_finite, out_shardings=whole)([leaf for _, leaf in leaves])
    bad = np.flatnonzero(~np.asarray(finite))
    if not bad.size:
        return None
    return jax.tree_util.keystr(leaves[bad[0]][0], simple=True, separator="/")


def _each_finite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
