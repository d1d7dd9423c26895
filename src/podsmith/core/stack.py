"""Stack: one block applied to layers that are stacked on axis 0.

Scanned, unrolled where the platform's compiler prefers it, or cut into stages; the weights
are stored the same way in all cases.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
from jax import Array

from podsmith.core.cpu import layer_of, together, unstacked
from podsmith.core.param import Tree
from podsmith.core.pipeline import num_stages, pipelined
from podsmith.core.weight import GATE, MATMUL, WIDE_MATMUL

ATTENTION = "attention"  # what a kernel keeps of its forward pass

Remat = Literal["none", "dots", "gate", "mlp", "block"]


def rematerialized(
    block: Callable[..., Any], remat: Remat, *, prevent_cse: bool = False
) -> Callable[..., Any]:
    """`block` whose backward pass recomputes what `remat` says; outside of a loop
    `prevent_cse` keeps the compiler from finding it in the forward pass."""
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names(MATMUL, WIDE_MATMUL, GATE, ATTENTION),
        "gate": policies.save_only_these_names(MATMUL, WIDE_MATMUL, ATTENTION),
        "mlp": policies.save_only_these_names(MATMUL, ATTENTION),
        "block": policies.nothing_saveable,
    }[remat]
    return jax.checkpoint(block, policy=policy, prevent_cse=prevent_cse)


def run_stack(
    block: Callable[..., Array],
    layers: Tree,
    x: Array,
    *side: Any,
    remat: Remat = "none",
    unroll: bool = False,
    num_microbatches: int = 1,
) -> Array:
    """x [B, ...] after `block(layers[i], x, *side)` for each i; leaves of `layers` are
    [L, ...], those of `side` [B, ...]. Over stages, rows go in `num_microbatches` pieces."""
    if unroll and num_stages() == 1:
        return _unrolled(block, layers, x, *side, remat=remat)
    block = rematerialized(block, remat)
    if num_stages() > 1:
        return pipelined(block, layers, x, *side, num_microbatches=num_microbatches)
    x, _ = jax.lax.scan(lambda carry, w: (block(w, carry, *side), None), x, layers)
    return x


def _unrolled(
    block: Callable[..., Array], layers: Tree, x: Array, *side: Any, remat: Remat
) -> Array:
    """The same without a loop, for platforms where fresh memory costs more than arithmetic on
    elements: what is no product's result is computed again, and a layer's slice of the
    weights is taken again, rather than kept."""
    leaves, tree = jax.tree.flatten(layers)

    def one(index: int, slots: list[Array], leaves: list[Array], x: Array, *side: Any) -> Array:
        layer = [layer_of(index, *pair) for pair in zip(slots, leaves, strict=True)]
        return block(jax.tree.unflatten(tree, layer), x, *side)

    fixed = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    for index, slots in enumerate(zip(*map(unstacked, leaves), strict=True)):
        again = rematerialized(
            partial(one, index), "dots" if remat == "none" else remat, prevent_cse=True
        )
        x, *slots = together(x, *slots)
        x = again(slots, fixed, x, *side)
    return x


def run_stack_cached(
    block: Callable[[Tree, Array, Tree], tuple[Array, Tree]], layers: Tree, x: Array, cache: Tree
) -> tuple[Array, Tree]:
    """The same with a cache of leaves [L, ...] read and rewritten layer by layer."""

    def body(carry: Array, slot: tuple[Tree, Tree]) -> tuple[Array, Tree]:
        return block(slot[0], carry, slot[1])

    return jax.lax.scan(body, x, (layers, cache))
