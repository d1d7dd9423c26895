"""Stack: one block applied to layers that are stacked on axis 0.

Scanned, unrolled where the platform's compiler prefers it, or cut into stages; the weights
are stored the same way in all cases.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import Array

from podsmith.core.cpu import unstacked
from podsmith.core.param import Tree
from podsmith.core.pipeline import num_stages, pipelined
from podsmith.core.weight import GATE, MATMUL, WIDE_MATMUL

ATTENTION = "attention"  # what a kernel keeps of its forward pass

Remat = Literal["none", "dots", "gate", "mlp", "block"]


def rematerialized(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`block` whose backward pass recomputes what `remat` says."""
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names(MATMUL, WIDE_MATMUL, GATE, ATTENTION),
        "gate": policies.save_only_these_names(MATMUL, WIDE_MATMUL, ATTENTION),
        "mlp": policies.save_only_these_names(MATMUL, ATTENTION),
        "block": policies.nothing_saveable,
    }[remat]
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


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
    block = rematerialized(block, remat)
    if num_stages() > 1:
        return pipelined(block, layers, x, *side, num_microbatches=num_microbatches)
    if unroll:
        leaves, tree = jax.tree.flatten(layers)
        for layer in zip(*map(unstacked, leaves), strict=True):
            x = block(jax.tree.unflatten(tree, layer), x, *side)
        return x
    x, _ = jax.lax.scan(lambda carry, w: (block(w, carry, *side), None), x, layers)
    return x


def run_stack_cached(
    block: Callable[[Tree, Array, Tree], tuple[Array, Tree]], layers: Tree, x: Array, cache: Tree
) -> tuple[Array, Tree]:
    """The same with a cache of leaves [L, ...] read and rewritten layer by layer."""

    def body(carry: Array, slot: tuple[Tree, Tree]) -> tuple[Array, Tree]:
        return block(slot[0], carry, slot[1])

    return jax.lax.scan(body, x, (layers, cache))
