"""Stack: blocks applied to layers that are stacked on axis 0.

Scanned, unrolled where the platform's compiler prefers it, or cut into stages; the weights
are stored the same way in all cases.

Layers of several kinds are cut into spans in which a short pattern of them repeats.

    kinds of the layers      d  m  m  m  m  m         l l l l l g  l l l l l g  l l
                             |  +-----v-----+         +-----v----------------+  +v+
    spans                    |  m, 5 times            (l l l l l g), twice      l, twice
                             d, once

Weights of a span are stacked on axis 0, one stack for each place in its pattern, so that a
compiler sees every place once however many layers there are. The span that holds the most
layers is called `layers`, another `layers_from_N` by its first layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.registry import Registry
from lmwright.core.compute import REMATS, Remat, unrolled
from lmwright.core.param import Tree
from lmwright.core.pipeline import num_stages, pipelined
from lmwright.core.sharding import batch_ways, platform

LAYERS = "layers"
LAZY = Registry(__package__, {"slots": "gpu_slots.slots_of", "cuts": "cuts.fewest"})
LONGEST_PATTERN = 16

Aux = dict[str, Array]
"""Sums over tokens that blocks return beside the residual stream: losses, counts."""
Block = Callable[..., tuple[Array, Aux]]


def run_stack(
    blocks: Sequence[Block], layers: Tree, x: Array, *side: Any,
    remat: Remat = REMATS["none"], unroll: bool = False, num_microbatches: int = 1,
) -> tuple[Array, Aux]:  # fmt: skip
    """Applies `block(weights, x, *side)` of each layer to x [B, ...]; returns x and the sums over
    layers of what else the blocks return.

    There is one block for each place of the span's pattern; leaves of `layers` are [L, ...],
    below "0", "1", ... where there are several places; those of `side` are [B, ...]. Over
    stages, rows go in `num_microbatches` pieces."""
    layers = layers if (several := len(blocks) > 1) else {"0": layers}
    if unroll and num_stages() == 1:
        summed = num_microbatches > 1
        return _unrolled(_chained(blocks), layers, x, *side, remat=remat, summed=summed)
    # XLA takes a loop of one round apart, and would keep what is to be computed again
    apart = several or len(jax.tree.leaves(layers)[0]) == 1
    block = _chained([remat.apply(block, prevent_cse=apart) for block in blocks], apart)
    if num_stages() > 1:
        return pipelined(block, layers, x, *side, num_microbatches=num_microbatches)
    x, aux = jax.lax.scan(lambda carry, w: block(w, carry, *side), x, layers)
    return x, jax.tree.map(lambda a: jnp.sum(a, axis=0), aux)


def _unrolled(
    block: Block, layers: Tree, x: Array, *side: Any, remat: Remat, summed: bool
) -> tuple[Array, Aux]:
    """Stack without a loop, where fresh memory costs more than elementwise arithmetic: the backward
    pass recomputes the slices of the weights and all results but those of matmuls. `summed`:
    gradients are added up over microbatches."""
    leaves, tree = jax.tree.flatten(layers)

    def one(index: int, slots: list[Array], leaves: list[Array], x: Array, *side: Any):
        layer = [layer_of(index, a.dtype, a, b) for a, b in zip(slots, leaves, strict=True)]
        return block(jax.tree.unflatten(tree, layer), x, *side)

    fixed = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    aux: Aux = {}
    mesh = jax.sharding.get_abstract_mesh()
    policy, gpu = unrolled(remat, platform(), mesh.size), platform() == "gpu"
    apart = LAZY["slots"](block, layers, x, *side, summed=summed) if gpu else map(unstacked, leaves)
    slots = [list(layer) for layer in zip(*apart, strict=True)]
    # devices sum a layer's gradients behind products of the layer before
    late = int(batch_ways(mesh) > 1)
    for index in range(len(slots)):
        again = policy.apply(partial(one, index), prevent_cse=True, place=2)
        if (tied := index + late) < len(slots):
            x, *slots[tied] = joint_gradients(x, *slots[tied])
        if gpu:  # XLA would widen all layers at once, and hold a wide model
            x, *fixed = lax.optimization_barrier((x, *fixed))
        x, new = again(slots[index], fixed, x, *side)
        aux = jax.tree.map(jnp.add, aux, new) if aux else new
    return x, aux


def unstacked(layers: Array) -> list[Array]:
    """Slices [1, ...] of axis 0; their gradients are put together by one concatenation instead
    of a sum of padded arrays."""
    return list(lax.split(layers, [1] * layers.shape[0], axis=0))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def layer_of(index: int, dtype: jnp.dtype, slot: Array, layers: Array) -> Array:
    """`layers[index]`, whose gradient goes to `slot`, one of `unstacked(layers.astype(dtype))`.

    The slot's own value is never read: a backward pass that computes this again takes the
    slice from the stack, and no copy of the layer lives in between.
    """
    del slot
    return lax.index_in_dim(layers, index, keepdims=False)


def _layer_of_fwd(index: int, dtype: jnp.dtype, slot: Array, layers: Array) -> tuple[Array, None]:
    return layer_of(index, dtype, slot, layers), None


def _layer_of_bwd(index: int, dtype: jnp.dtype, residuals: None, g: Array) -> tuple[Array, None]:
    return g[None].astype(dtype), None


layer_of.defvjp(_layer_of_fwd, _layer_of_bwd)


@jax.custom_vjp
def joint_gradients(*inputs: Tree) -> tuple[Tree, ...]:
    """Identity whose gradients are forced to be computed together; XLA would otherwise postpone
    weight gradients and keep their inputs alive."""
    return inputs


def _joint_fwd(*inputs: Any) -> tuple[tuple[Tree, ...], tuple[Any, ...]]:
    trained = tuple(() if a.perturbed else None for a in jax.tree.leaves(inputs))  # by structure
    return jax.tree.map(lambda a: a.value, inputs), trained


def _joint_bwd(trained: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    # nothing reads a frozen input's gradient, but in the barrier it would be computed all the same
    leaves, tree = jax.tree.flatten(grads)
    wanted = [t is not None and isinstance(g, Array) for t, g in zip(trained, leaves, strict=True)]
    given = iter(lax.optimization_barrier([g for g, w in zip(leaves, wanted, strict=True) if w]))
    return jax.tree.unflatten(tree, [next(given) if w else None for w in wanted])


joint_gradients.defvjp(_joint_fwd, _joint_bwd, symbolic_zeros=True)


def _chained(blocks: Sequence[Block], in_turn: bool = False) -> Block:
    """Chains blocks into one; block i reads `w[str(i)]`. If `in_turn`, the backward pass of block
    i, weight gradients included, ends before that of block i - 1 begins."""

    def block(w: Tree, x: Array, *side: Any) -> tuple[Array, Aux]:
        total: Aux = {}
        for i, each in enumerate(blocks):
            x, own = joint_gradients(x, w[str(i)]) if in_turn else (x, w[str(i)])
            x, aux = each(own, x, *side)
            total = added(total, aux)
        return x, total

    return block


def added(total: Aux, aux: Aux) -> Aux:
    """Sums by name; a name may be in one of the two alone."""
    return total | {k: total[k] + v if k in total else v for k, v in aux.items()}


@dataclass(frozen=True)
class Span:
    """Layers `first`, `first` + 1, ... with `kinds` repeating `repeats` times."""

    name: str
    kinds: tuple[Any, ...]
    repeats: int
    first: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.repeats

    def places(self) -> Iterator[tuple[str, Any, range]]:
        """(path of the stack in the weights, kind, numbers of its layers) by place."""
        for i, kind in enumerate(self.kinds):
            path = f"{self.name}.{i}" if len(self.kinds) > 1 else self.name
            start = self.first + i
            yield path, kind, range(start, start + self.num_layers, len(self.kinds))


@cache
def spans(kinds: tuple[Any, ...]) -> tuple[Span, ...]:
    """The spans of layers of these kinds in order, with few places in all."""
    cuts = min(_cuts(kinds), key=lambda cuts: sum(len(pattern) for pattern, _ in cuts))
    if sum(len(pattern) for pattern, _ in cuts) > LONGEST_PATTERN:  # of no regular order
        cuts = LAZY["cuts"](kinds, LONGEST_PATTERN)
    most = max(range(len(cuts)), key=lambda i: len(cuts[i][0]) * cuts[i][1])
    result, first = [], 0
    for i, (pattern, repeats) in enumerate(cuts):
        name = LAYERS if i == most else f"{LAYERS}_from_{first}"
        result.append(Span(name, pattern, repeats, first))
        first += len(pattern) * repeats
    return tuple(result)


Cuts = list[tuple[tuple[Any, ...], int]]


def _cuts(kinds: tuple[Any, ...]) -> Iterator[Cuts]:
    """Ways to cut: runs of one kind, a repeated pattern, runs of one kind."""
    yield _runs(kinds)
    for start in range(len(kinds)):
        for length in range(1, min(LONGEST_PATTERN, len(kinds) - start) + 1):
            pattern = kinds[start : start + length]
            end = start
            while kinds[end : end + length] == pattern:
                end += length
            if end > start + length:
                repeats = (end - start) // length
                yield [*_runs(kinds[:start]), (pattern, repeats), *_runs(kinds[end:])]


def _runs(kinds: Sequence[Any]) -> Cuts:
    runs: Cuts = []
    for kind in kinds:
        if runs and runs[-1][0] == (kind,):
            runs[-1] = ((kind,), runs[-1][1] + 1)
        else:
            runs.append(((kind,), 1))
    return runs
