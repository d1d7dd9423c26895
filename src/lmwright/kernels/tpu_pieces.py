"""Long rows in pieces, as if each were a row of its own, in all of a layer but its attention.

    x [B, T, D] --> pieces [B P, T / P, D] --layers--> pieces --> x [B, T, D]
                            |    ^
                    q, k, v v    | all pieces of a row
                        attention

With one row a device, TPU compilers drop the axis of rows. Then they write products that are saved
for the backward pass apart from the stack of layers, take steps between two products by themselves,
and keep the residual stream in a layout that other products do not read. With several rows they do
neither. Layers compute the same for every token, whichever row holds it; the kernel of long rows
reads each piece where it is.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.core.pipeline import num_stages
from lmwright.core.sharding import batch_ways, constrain, context_ways, tensor_ways
from lmwright.kernels import tpu_attention, tpu_row_attention
from lmwright.kernels.select import LONG_ROW, unchanged

PIECE = LONG_ROW  # tokens; spans of the kernel divide it

Change = Callable[[Array], Array]


def cut_and_join(
    model: Any, x: Array, tables: Tree, compute: Compute, attend: Callable[..., Array]
) -> tuple[Change, Change]:
    """Functions that cut rows [B, T, ...] into pieces and join those of the residual stream, where
    that is faster; elsewhere they change nothing."""
    if not takes_pieces(model, x, tables, compute, attend):
        return unchanged, unchanged
    count = x.shape[0] * x.shape[1] // PIECE  # said, as tables of no rotation have no numbers
    cut = lambda a: constrain(a.reshape(count, PIECE, *a.shape[2:]), "batch seq")  # noqa: E731
    return cut, lambda a: constrain(a.reshape(x.shape), "batch stream embed")


def takes_pieces(
    model: Any, x: Array, tables: Tree, compute: Compute, attend: Callable[..., Array]
) -> bool:
    """True for rows x [B, T, D] that are faster in pieces, and compute the same in them."""
    if attend is not tpu_attention.causal_attention:
        return False  # other kernels do not take pieces
    mesh, (rows, tokens) = jax.sharding.get_abstract_mesh(), x.shape[:2]
    if tokens % PIECE or not context_ways() == tensor_ways() == num_stages() == 1:
        return False
    if rows != (1 if mesh.empty else batch_ways(mesh)):
        return False  # only a device with one row is slow
    size = model.head_dim
    if size % tpu_attention.TILE or tpu_row_attention.fits(tokens, size, x.dtype.itemsize):
        return False  # the kernel of long rows does not take them
    if model.mixtures or compute.mlp_chunk_tokens or compute.block_inputs != "exact":
        return False  # what they do depends on rows
    if model.mixer != "attention":
        return False  # layers with memories read whole rows
    return all(leaf.shape[:2] == (rows, tokens) for leaf in jax.tree.leaves(tables))
