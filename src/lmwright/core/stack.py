"""Stack: blocks applied to layers that are stacked on axis 0.

Scanned, unrolled where the platform's compiler prefers it, or cut into stages; the weights
are stored the same way in all cases.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import REMATS, RematName
from lmwright.core.cpu import layer_of, together, unstacked
from lmwright.core.param import Tree
from lmwright.core.pipeline import num_stages, pipelined

Aux = dict[str, Array]
"""Sums over tokens that blocks return beside the residual stream: losses, counts."""
Block = Callable[..., tuple[Array, Aux]]


def run_stack(
    blocks: Sequence[Block],
    layers: Tree,
    x: Array,
    *side: Any,
    remat: RematName = "none",
    unroll: bool = False,
    num_microbatches: int = 1,
) -> tuple[Array, Aux]:
    """x [B, ...] after each layer's `block(weights, x, *side)`, and the sums over layers of
    what else the blocks return.

    There is one block for each place of the span's pattern; leaves of `layers` are [L, ...],
    below "0", "1", ... where there are several places; those of `side` are [B, ...]. Over
    stages, rows go in `num_microbatches` pieces."""
    layers = layers if len(blocks) > 1 else {"0": layers}
    if unroll and num_stages() == 1:
        return _unrolled(_chained(blocks), layers, x, *side, remat=remat)
    block = _chained([REMATS[remat].apply(block) for block in blocks])
    if num_stages() > 1:
        return pipelined(block, layers, x, *side, num_microbatches=num_microbatches)
    x, aux = jax.lax.scan(lambda carry, w: block(w, carry, *side), x, layers)
    return x, jax.tree.map(lambda a: jnp.sum(a, axis=0), aux)


def _unrolled(
    block: Block, layers: Tree, x: Array, *side: Any, remat: RematName
) -> tuple[Array, Aux]:
    """Stack of layers without a loop, for platforms where fresh memory costs more than elementwise
    arithmetic. Results other than those of matmuls, and the slices of the weights, are recomputed
    in the backward pass rather than kept."""
    leaves, tree = jax.tree.flatten(layers)

    def one(index: int, slots: list[Array], leaves: list[Array], x: Array, *side: Any):
        layer = [layer_of(index, *pair) for pair in zip(slots, leaves, strict=True)]
        return block(jax.tree.unflatten(tree, layer), x, *side)

    fixed = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    aux: Aux = {}
    policy = REMATS["dots" if remat == "none" else remat]
    for index, slots in enumerate(zip(*map(unstacked, leaves), strict=True)):
        again = policy.apply(partial(one, index), prevent_cse=True)
        x, *tied = together(x, *slots)
        x, new = again(tied, fixed, x, *side)
        aux = jax.tree.map(jnp.add, aux, new) if aux else new
    return x, aux


def _chained(blocks: Sequence[Block]) -> Block:
    """One block of several, whose weights lie below their numbers."""

    def block(w: Tree, x: Array, *side: Any) -> tuple[Array, Aux]:
        total: Aux = {}
        for i, each in enumerate(blocks):
            x, aux = each(w[str(i)], x, *side)
            total = added(total, aux)
        return x, total

    return block


def added(total: Aux, aux: Aux) -> Aux:
    """Sums by name; a name may be in one of them alone."""
    return total | {k: total[k] + v if k in total else v for k, v in aux.items()}


def run_stack_cached(
    blocks: Sequence[Callable[[Tree, Array, Tree], tuple[Array, Tree]]],
    layers: Tree,
    x: Array,
    cache: Tree,
) -> tuple[Array, Tree]:
    """Runs the stack with a cache laid out like the weights, read and rewritten layer by layer.
    Both are unrolled or scanned together."""
    if isinstance(layers, list):
        slots = []
        for w, slot in zip(layers, cache, strict=True):
            x, new = _through(blocks, w, x, slot)
            slots.append(new)
        return x, slots

    def body(carry: Array, slot: tuple[Tree, Tree]) -> tuple[Array, Tree]:
        return _through(blocks, slot[0], carry, slot[1])

    return jax.lax.scan(body, x, (layers, cache))


def _through(
    blocks: Sequence[Callable[[Tree, Array, Tree], tuple[Array, Tree]]],
    w: Tree,
    x: Array,
    slot: Tree,
) -> tuple[Array, Tree]:
    if len(blocks) == 1:
        return blocks[0](w, x, slot)
    new = {}
    for i, block in enumerate(blocks):
        x, new[str(i)] = block(w[str(i)], x, slot[str(i)])
    return x, new


def apart(layers: Tree) -> list[Tree]:
    """A tree of arrays stacked on axis 0 as a list of trees, one a layer: a program that takes
    them so reads each weight where it lies, where a slice of a stack would be copied first."""
    leaves, tree = jax.tree.flatten(layers)
    return [jax.tree.unflatten(tree, [a[i] for a in leaves]) for i in range(len(leaves[0]))]
