"""Products with a matrix that is several in one, such as those of queries, keys and values."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from lmwright.core.fanout import dots
from lmwright.core.param import Tree
from lmwright.core.weight import dot
from lmwright.models.block import with_bias
from lmwright.nn.for_all import plus


def parts(
    eqn: str, h: Array, w: Tree, name: str, cuts: Sequence[int], axis: int = 0
) -> list[Array]:
    """The projection `name` of h [B, T, D], cut along an axis of its outputs. An array is cut
    before the product, since a TPU copies what is cut from its result."""
    leaf, bias = w[name], w.get(f"{name}_bias")
    if not isinstance(leaf, Array):
        return jnp.split(with_bias(dot(eqn, h, leaf), w, name), cuts, axis=axis + 2)
    outputs = dots(h, *((eqn, part) for part in jnp.split(leaf, cuts, axis=axis + 1)))
    if bias is None:
        return list(outputs)
    biases = jnp.split(bias, cuts, axis=axis)
    return [plus(y, b) for y, b in zip(outputs, biases, strict=True)]
