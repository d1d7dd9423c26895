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
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.core.pipeline import num_stages
from lmwright.core.sharding import batch_ways, constrain, context_ways, tensor_ways
from lmwright.kernels import tpu_attention, tpu_row_attention

PIECE = 2048  # tokens; spans of the kernel divide it

Kernel = Callable[..., Array]


def run_layers(
    model: Any, run: Callable[..., Any], layer: Any, spans: Any, w: Tree, x: Array, tables: Tree,
    batch: Batch, compute: Compute, kernel: Kernel,
) -> tuple[Array, Any]:  # fmt: skip
    """`run(layer, ..., kernel)`, which is `models.layers.run_layers` of a decoder, with rows in
    pieces where that is faster."""
    if num_pieces(model, x, tables, compute, kernel) == 1:
        return run(layer, spans, w, x, tables, batch, compute, kernel)
    cut = lambda a: constrain(a.reshape(-1, PIECE, *a.shape[2:]), "batch seq")  # noqa: E731
    tables = jax.tree.map(cut, tables)
    pieces, aux = run(layer, spans, w, cut(x), tables, batch, compute, kernel)
    return constrain(pieces.reshape(x.shape), "batch stream embed"), aux


def num_pieces(model: Any, x: Array, tables: Tree, compute: Compute, kernel: Kernel) -> int:
    """Pieces of each row of x [B, T, D]: 1 unless each device has one whole row, the causal kernel
    of long rows takes it, and nothing but attention depends on what is a row."""
    if kernel is not tpu_attention.causal_attention or model.mixtures:
        return 1
    mesh, (rows, tokens) = jax.sharding.get_abstract_mesh(), x.shape[:2]
    alone = rows == (1 if mesh.empty else batch_ways(mesh))
    whole = context_ways() == tensor_ways() == num_stages() == 1
    size, row_kernel = model.head_dim, tpu_row_attention
    long = size % tpu_attention.TILE == 0 and not row_kernel.fits(tokens, size, x.dtype.itemsize)
    by_token = compute.mlp_chunk_tokens is None and compute.block_inputs == "exact"
    by_token &= all(leaf.shape[:2] == (rows, tokens) for leaf in jax.tree.leaves(tables))
    return tokens // PIECE if tokens % PIECE == 0 and alone and whole and long and by_token else 1
