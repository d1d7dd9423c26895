"""A few chunks of a cross-entropy without a loop, for GPUs: a loop would pass over the weights'
gradient once more for each chunk."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import Tree
from lmwright.nn.xent import OneChunk, Xent


def one_by_one(one: OneChunk, w: Tree, pieces: tuple[Array, ...]) -> tuple[Xent, Tree, Array]:
    """Sums over chunks, that of the gradients in the precision of the weights `w`, and the
    gradients [C, ...] of their inputs. Each chunk waits for the one before, so that the logits of
    one are in memory."""
    piece, *others = ([a[i] for a in pieces] for i in range(len(pieces[0])))
    sums, dw, dx = one(piece)
    every = [dx]
    for piece in others:
        sums, dw, every[-1], piece = lax.optimization_barrier((sums, dw, every[-1], piece))
        new, more, dx = one(piece)
        sums = jax.tree.map(jnp.add, sums, new)
        dw = jax.tree.map(lambda a, b, own: a.astype(own.dtype) + b.astype(own.dtype), dw, more, w)
        every.append(dx)
    return sums, jax.tree.map(lambda a, own: a.astype(own.dtype), dw, w), jnp.stack(every)
