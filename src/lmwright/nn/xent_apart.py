"""A few chunks of a cross-entropy without a loop, for GPUs: a loop would pass over the weights'
gradient once more for each chunk."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import Tree
from lmwright.nn.xent import OneChunk, Xent


def one_by_one(
    xent_of_chunk: OneChunk, w: Tree, pieces: tuple[Array, ...]
) -> tuple[Xent, Tree, Array]:
    """Sums over chunks, gradients of the weights `w` in their own precision, and gradients [C, ...]
    of the inputs. Each chunk waits for the one before, so only one has its logits in memory."""
    piece, *others = ([a[i] for a in pieces] for i in range(len(pieces[0])))
    sums, dw, dx = xent_of_chunk(piece)
    every = [dx]
    for piece in others:
        sums, dw, every[-1], piece = lax.optimization_barrier((sums, dw, every[-1], piece))
        new_sums, new_dw, dx = xent_of_chunk(piece)
        sums = jax.tree.map(jnp.add, sums, new_sums)
        dw = jax.tree.map(
            lambda a, b, weight: a.astype(weight.dtype) + b.astype(weight.dtype), dw, new_dw, w
        )
        every.append(dx)
    return sums, jax.tree.map(lambda a, weight: a.astype(weight.dtype), dw, w), jnp.stack(every)
