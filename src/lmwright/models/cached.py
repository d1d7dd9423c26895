"""A decoder that goes on from a cache: what each layer carries from token to token, and how the
layers run on it.

    keys and values of all tokens, [B, S, K, H]     an attention layer writes new ones, looks at all
    a memory of constant size                       `attend.carry` hands it over and takes it again

The state of a layer is a tree of arrays by its kind (`Decoder.state`); a cache is laid out like the
weights. No step of training needs this module.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import DictKey

from lmwright.core.compute import Compute
from lmwright.core.in_stack import InStack, as_copied
from lmwright.core.param import Tree
from lmwright.core.stack import Span
from lmwright.kernels import select
from lmwright.models.decoder import Decoder
from lmwright.models.experts import EXPERT
from lmwright.models.layers import Attend, Layer, LayerKind, Spans, by_place
from lmwright.nn.attention import Scoring
from lmwright.nn.cached_attention import cached_attention
from lmwright.nn.chunks import InChunks, seen_in_chunk


def new_cache(model: Decoder, batch_size: int, length: int, compute: Compute) -> Tree:
    """Empty cache for `length` tokens a row."""

    def empty(kind: LayerKind, *layers: int) -> Tree:
        state = model.state(kind.kind, batch_size=batch_size, length=length, dtype=compute.dtype)
        return jax.tree.map(lambda a: jnp.zeros((*layers, *a.shape), a.dtype), state)

    def of(span: Span) -> Tree:
        if compute.unroll:
            return [by_place([empty(kind) for kind in span.kinds]) for _ in range(span.repeats)]
        return by_place([empty(kind, span.repeats) for kind in span.kinds])

    return {
        "layers": {span.name: of(span) for span in model.spans},
        "valid": jnp.zeros((batch_size, length), bool),
        "filled": jnp.zeros((), jnp.int32),
    }


def layers_apart(model: Decoder, w: Tree, *, free: bool = False) -> Tree:
    """The weights with each span's layers as a list, for `extend` with `compute.unroll`; those that
    are lists stay. `free` gives back the memory of each stack once its layers are copied."""
    stacks = {span.name: w[span.name] for span in model.spans}
    return w | {
        name: layers if isinstance(layers, list) else as_list(layers, free=free)
        for name, layers in stacks.items()
    }


def as_list(layers: Tree, *, free: bool = False) -> list[Tree]:
    """Splits a tree of arrays stacked on axis 0 into a list of trees, one a layer. A program that
    takes these reads each weight in place, where slices of a stack would be copied. With `free` a
    stack's memory is given back before the next is copied: `layers` cannot be read any more."""
    leaves, tree = jax.tree.flatten(layers)
    apart = []
    for stack in leaves:
        apart.append([stack[i] for i in range(len(stack))])
        if free:
            jax.block_until_ready(apart[-1])
            stack.delete()
    return [jax.tree.unflatten(tree, layer) for layer in zip(*apart, strict=True)]


class Branches(NamedTuple):
    """Several texts in a row that all go on from the tokens before: a token of a branch sees its
    own branch and branch 0, the trunk, which goes first."""

    of: Array
    """int [B, T]: the branch of each new token; those in the cache are of the trunk."""
    positions: Array
    """int [B, T]: positions of new tokens; those of a branch go on from the end of the trunk."""


def extend(
    model: Decoder, w: Tree, tokens: Array, valid: Array, cache: Tree, compute: Compute,
    *, empty_cache: bool = False, branches: Branches | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """hidden [B, T, D] of new tokens [B, T] after those in the cache, and the new cache.
    `empty_cache`: there are none in it, so that the platform's kernel is used. Nothing can go on
    from a cache with `branches`.

    `valid` [B, T] is False at (left) padding, which is never attended to and counts
    for no position. The caller sees to it that the cache is long enough.
    """
    positions = cache_positions(valid, cache) if branches is None else branches.positions
    tables = model.tables(positions, cache["valid"].shape[1])
    x = model.placed(w, model.embedded(w, tokens, compute), positions)
    kernel = None
    if empty_cache:
        kernel = attention_of(model, compute)
    w = model.with_inputs(w, tokens, x)
    x, cache = extend_layers(
        model.layer, model.spans, w, x, tables, valid, cache, kernel, model.tables_after, branches
    )
    return model.stream_norm(w, x), cache


def attention_of(model: Decoder, compute: Compute) -> Callable[..., Array]:
    """The platform's attention for whole rows of a decoder."""
    named = "attention with sinks" if model.sinks else getattr(model, "attention", None)
    return (select.KERNELS[named] if named else select.causal_attention)(compute)


def cache_positions(valid: Array, cache: Tree) -> Array:
    """int [B, T]: positions of new tokens in their rows; padding, where `valid` [B, T] is False, is
    not counted."""
    before = jnp.sum(cache["valid"], axis=1, keepdims=True)
    return jnp.maximum(before + jnp.cumsum(valid, axis=1) - 1, 0)


def _visible(
    valid: Array, cache: Tree, branches: Branches | None
) -> tuple[Array, Array, Array, Array]:
    """Masks of new tokens [B, T] in a cache of S: which are tokens, [B, S]; which each new one
    sees, [B, T, S]; how many positions those are behind it, padding not counted, [B, T, S]; and its
    own position, [B, T]."""
    start, num = cache["filled"], valid.shape[1]
    put = partial(jax.lax.dynamic_update_slice, start_indices=(0, start))
    all_valid = put(cache["valid"], valid)
    places = jnp.cumsum(all_valid, axis=1)  # [B, S]
    order = start + jnp.arange(num)[:, None] >= jnp.arange(all_valid.shape[1])
    seen = order[None] & all_valid[:, None, :]
    if branches is not None:
        places = put(places, branches.positions + 1)
        of = put(jnp.zeros_like(places), branches.of)[:, None, :]
        seen &= (of == 0) | (of == branches.of[:, :, None])
    query = jax.lax.dynamic_slice_in_dim(places, start, num, axis=1)
    return all_valid, seen, query[:, :, None] - places[:, None, :], jnp.maximum(query - 1, 0)


def extend_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, valid: Array, cache: Tree,
    kernel: Callable[..., Array] | None, tables_after: Callable[[Span, Tree, Tree], Tree],
    branches: Branches | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """x [B, T, D] of new tokens after those in the cache, and the new cache. `kernel` is that
    of the platform where the cache is empty: new tokens then see each other alone.
    `tables_after(span, new states of its layers, tables)` are those of the layers behind it."""
    start = cache["filled"]
    all_valid, seen, back, at = _visible(valid, cache, branches)
    ids = valid.astype(jnp.int32)

    def block(tables: Tree, kind: LayerKind, w: Tree, x: Array, state: Tree) -> tuple[Array, Tree]:
        new: list[Tree] = []

        def attend(q: Array, k: Array, v: Array, scoring: Scoring, *sinks: Array) -> Array:
            if state:
                after = {"k": _put(state["k"], k, start)}
                if "v" in state:  # not where keys are the values, too
                    after["v"] = _put(state["v"], v, start)
                new.append(after)
                every = as_copied(after["k"]), as_copied(after.get("v", after["k"]))
            else:  # those of another layer, all of them
                every = k, v
                k, v = (a[:, : x.shape[1]] for a in every)
            if kernel is not None:
                return kernel(q, k, v, *sinks, ids, scoring)
            near: Any = scoring.window
            if isinstance(scoring, InChunks):
                near = seen_in_chunk(at, near)[..., None]
            mask = seen if near is None else seen & (back < near)
            return cached_attention(q, *every, mask, scoring, *sinks)

        of_state = Attend(attend, ids, state=state, put=new.append)
        x, _ = kind.run(layer, w, x, tables, of_state)
        if len(new) > 1:  # of attention, and of a memory beside it
            return x, {name: leaf for part in new for name, leaf in part.items()}
        return x, new[0] if new else state  # an mlp alone puts nothing

    layers: Tree = {}
    for span in spans:
        blocks = [partial(block, tables, kind) for kind in span.kinds]
        x, layers[span.name] = run_stack_cached(blocks, w[span.name], x, cache["layers"][span.name])
        tables = tables_after(span, layers[span.name], tables)
    return x, {"layers": layers, "valid": all_valid, "filled": start + valid.shape[1]}


def run_stack_cached(
    blocks: Sequence[Callable[[Tree, Array, Tree], tuple[Array, Tree]]],
    layers: Tree,
    x: Array,
    cache: Tree,
) -> tuple[Array, Tree]:
    """Runs the stack with a cache laid out like the weights, read and rewritten layer by layer.
    Both are unrolled or scanned together. A scan leaves keys and values, and matrices of experts,
    where they lie: of the first it writes those of new tokens alone."""
    if isinstance(layers, list):
        slots = []
        for w, slot in zip(layers, cache, strict=True):
            x, new = _through(blocks, w, x, slot)
            slots.append(new)
        return x, slots
    experts, w = _divided(layers, _of_experts)
    kept, rest = _divided(cache, _of_attention)

    def body(carry: tuple[Array, Tree], slot: tuple[Array, Tree, Tree]) -> tuple[Tree, Tree]:
        (x, kept), (layer, w, rest) = carry, slot
        w, state = (
            _joined(jax.tree.map(lambda a: InStack(a, layer), stacks), others)
            for stacks, others in ((experts, w), (kept, rest))
        )
        x, new = _through(blocks, w, x, state)
        after, new = _divided(new, lambda _, a: _is_in_stack(a))
        return (x, jax.tree.map(lambda a: a.stack, after, is_leaf=_is_in_stack)), new

    num_layers = len(jax.tree.leaves(layers)[0])
    (x, kept), rest = jax.lax.scan(body, (x, kept), (jnp.arange(num_layers), w, rest))
    return x, _joined(kept, rest)


def _is_in_stack(a: Any) -> bool:
    return isinstance(a, InStack)


def _divided(tree: Tree, stays: Callable[[Any, Any], bool]) -> tuple[Tree, Tree]:
    """The tree with None in place of all leaves but those of which `stays(path, leaf)` is true, and
    in place of these."""
    chosen = jax.tree.map_with_path(stays, tree, is_leaf=_is_in_stack)
    kept = jax.tree.map(lambda stay, a: a if stay else None, chosen, tree)
    return kept, jax.tree.map(lambda stay, a: None if stay else a, chosen, tree)


def _joined(kept: Tree, rest: Tree) -> Tree:
    """The tree that was `_divided`."""
    is_leaf = lambda a: a is None or _is_in_stack(a)  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=is_leaf)


def _of_experts(path: tuple[Any, ...], leaf: Array) -> bool:
    """True for matrices [L, E, D, F] of experts in a program of one device, or that is spread."""
    mesh = jax.sharding.get_abstract_mesh()
    named = isinstance(path[-1], DictKey) and str(path[-1].key).startswith(EXPERT)
    return named and leaf.ndim == 4 and (mesh.empty or mesh.size == 1)


def _of_attention(path: tuple[Any, ...], leaf: Array) -> bool:
    """True for keys and values [L, B, S, K, H]."""
    return isinstance(path[-1], DictKey) and path[-1].key in ("k", "v")


def _put(cache: Array | InStack, new: Array, start: Array) -> Array | InStack:
    """Keys or values [B, S, K, H] with `new` ones [B, T, K, H] from `start` on."""
    at = (0, start, 0, 0)
    if isinstance(cache, InStack):
        return cache.put(new, at)
    return jax.lax.dynamic_update_slice(cache, new, at)


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
