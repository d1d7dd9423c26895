"""Feed-forwards of families with one of their own, a few tokens of each row at a time."""

from collections.abc import Callable, Mapping

from jax import Array

from lmwright.core.param import Tree
from lmwright.core.weight import name_result
from lmwright.kernels.select import KERNELS


def chunked(
    run: Callable[[Tree, Array], Array], axes: Mapping[str, str], w: Tree, h: Array,
    chunk_tokens: int | None,
) -> Array:  # fmt: skip
    """`run(w, h)` of h [B, T, D], `chunk_tokens` of each row at a time if set. `axes` has the
    weights that `run` may read, and their axes in one layer."""
    if chunk_tokens is None or chunk_tokens >= h.shape[1]:
        return run(w, h)
    mine = {name: w[name] for name in axes if name in w}
    return name_result(KERNELS["mlp by chunks"](run, axes, mine, h, chunk_tokens))
