"""Stack: blocks applied to layers that are stacked on axis 0.

Scanned, unrolled where the platform's compiler prefers it, or cut into stages; the weights
are stored the same way in all cases.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from podsmith.core.cpu import unstacked
from podsmith.core.param import Tree
from podsmith.core.pipeline import num_stages, pipelined
from podsmith.core.weight import GATE, MATMUL, WIDE_MATMUL

ATTENTION = "attention"  # what a kernel keeps of its forward pass

Aux = dict[str, Array]
"""Sums over tokens that blocks return beside the residual stream: losses, counts."""
Block = Callable[..., tuple[Array, Aux]]
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
    blocks: Sequence[Block],
    layers: Tree,
    x: Array,
    *side: Any,
    remat: Remat = "none",
    unroll: bool = False,
    num_microbatches: int = 1,
) -> tuple[Array, Aux]:
    """x [B, ...] after each layer's `block(weights, x, *side)`, and the sums over layers of
    what else the blocks return.

    There is one block for each place of the span's pattern; leaves of `layers` are [L, ...],
    below "0", "1", ... where there are several places; those of `side` are [B, ...]. Over
    stages, rows go in `num_microbatches` pieces."""
    block = _chained([rematerialized(block, remat) for block in blocks])
    layers = layers if len(blocks) > 1 else {"0": layers}
    if num_stages() > 1:
        return pipelined(block, layers, x, *side, num_microbatches=num_microbatches)
    if unroll:
        leaves, tree = jax.tree.flatten(layers)
        aux = None
        for group in zip(*map(unstacked, leaves), strict=True):
            x, new = block(jax.tree.unflatten(tree, group), x, *side)
            aux = new if aux is None else jax.tree.map(jnp.add, aux, new)
        return x, aux
    x, aux = jax.lax.scan(lambda carry, w: block(w, carry, *side), x, layers)
    return x, jax.tree.map(lambda a: jnp.sum(a, axis=0), aux)


def _chained(blocks: Sequence[Block]) -> Block:
    """One block of several, whose weights lie below their numbers."""

    def block(w: Tree, x: Array, *side: Any) -> tuple[Array, Aux]:
        total: Aux = {}
        for i, each in enumerate(blocks):
            x, aux = each(w[str(i)], x, *side)
            total |= {k: total[k] + v if k in total else v for k, v in aux.items()}
        return x, total

    return block


def run_stack_cached(
    blocks: Sequence[Callable[[Tree, Array, Tree], tuple[Array, Tree]]],
    layers: Tree,
    x: Array,
    cache: Tree,
) -> tuple[Array, Tree]:
    """The same with a cache laid out like the weights, read and rewritten layer by layer."""

    def body(carry: Array, slot: tuple[Tree, Tree]) -> tuple[Array, Tree]:
        if len(blocks) == 1:
            return blocks[0](slot[0], carry, slot[1])
        new = {}
        for i, block in enumerate(blocks):
            carry, new[str(i)] = block(slot[0][str(i)], carry, slot[1][str(i)])
        return carry, new

    return jax.lax.scan(body, x, (layers, cache))
