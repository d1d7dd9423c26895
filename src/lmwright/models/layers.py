"""Layers of a decoder: their weights by span, and how they run, over whole rows or going on from
those in a kv cache.

    family: layer(kind, weights, x, tables, attend) -> (x, aux)
                                            |
    run_layers      attend = the platform's kernel, inside segments
    extend_layers   attend = new keys and values put into the cache, all of it looked at

Kinds of layers and their order are the family's; see `core.stack`. A kind that is no string adds
something to a layer of another kind (`models.reasoning`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import BLOCK_INPUT, HEADS, Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree, stack
from lmwright.core.stack import Aux, Span, added, run_stack, run_stack_cached
from lmwright.core.weight import name_result
from lmwright.nn.attention import Scoring, cached_attention


@dataclass(frozen=True)
class Attend:
    """attend(q [B, T, N, H], k and v [B, T, K, H], scoring)."""

    run: Callable[..., Array]
    real: Array
    """bool [B, T]: False at padding."""
    mlp_chunk_tokens: int | None = None
    """Tokens of a row that an mlp takes at a time; all if unset."""

    def __call__(self, *args: Any, **masks: Any) -> Array:
        return self.run(*args, **masks)


Kernel = Callable[..., Array]
Layer = Callable[[str, Tree, Array, Tree, Attend], tuple[Array, Aux]]
Spans = tuple[Span, ...]


def layers_spec(spans: Spans, spec_of: Callable[[str], Tree]) -> dict[str, Tree]:
    """The Params of all spans, `spec_of(kind)` stacked for each place."""
    spec: dict[str, Tree] = {}
    for span in spans:
        whole = [
            spec_of(kind) if isinstance(kind, str) else kind.spec(spec_of) for kind in span.kinds
        ]
        spec[span.name] = _by_place([stack(layer, span.repeats) for layer in whole])
    return spec


def _applied(layer: Layer, kind: Any, *args: Any) -> tuple[Array, Aux]:
    """`layer` and what its kind adds to it."""
    return layer(kind, *args) if isinstance(kind, str) else kind.run(layer, *args)


def _by_place(trees: list[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else {str(i): tree for i, tree in enumerate(trees)}


def run_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, batch: Batch, compute: Compute,
    kernel: Kernel,
) -> tuple[Array, Aux]:  # fmt: skip
    """x [B, T, D] after all layers, and the sums of what they return beside it. `tables` are
    arrays [B, ...] that every layer sees, such as rotations; without rows if there are no stages.
    `kernel` takes q, k, v, what else a layer gives it, segment ids and how to score."""
    chunk = compute.mlp_chunk_tokens

    def block(kind: str, w: Tree, x: Array, tables: Tree, ids: Array) -> tuple[Array, Aux]:
        def attend(q: Array, k: Array, v: Array, *more: Any) -> Array:
            q, k, v = (name_result(a, HEADS) for a in (q, k, v))
            return kernel(q, k, v, *more[:-1], ids, more[-1])

        x = name_result(x, BLOCK_INPUT)
        return _applied(layer, kind, w, x, tables, Attend(attend, ids > 0, chunk))

    total: Aux = {}
    for span in spans:
        x, aux = run_stack(
            [partial(block, kind) for kind in span.kinds],
            w[span.name], x, tables, batch.segment_ids,
            remat=compute.policy, unroll=compute.unroll, num_microbatches=compute.num_microbatches,
        )  # fmt: skip
        total = added(total, aux)
    return x, total


def new_cache(
    spans: Spans, batch_size: int, length: int, kv_heads: int, head_dim: int, compute: Compute
) -> Tree:
    """Empty kv cache for `length` tokens a row."""

    def kv(*layers: int) -> Tree:
        shape = (*layers, batch_size, length, kv_heads, head_dim)
        return {"k": jnp.zeros(shape, compute.dtype), "v": jnp.zeros(shape, compute.dtype)}

    def of(span: Span) -> Tree:
        if compute.unroll:
            return [_by_place([kv() for _ in span.kinds]) for _ in range(span.repeats)]
        return _by_place([kv(span.repeats) for _ in span.kinds])

    return {
        "kv": {span.name: of(span) for span in spans},
        "valid": jnp.zeros((batch_size, length), bool),
        "filled": jnp.zeros((), jnp.int32),
    }


def cache_positions(valid: Array, cache: Tree) -> Array:
    """int [B, T]: places of new tokens in their rows; padding, where `valid` [B, T] is False,
    counts for none."""
    before = jnp.sum(cache["valid"], axis=1, keepdims=True)
    return jnp.maximum(before + jnp.cumsum(valid, axis=1) - 1, 0)


def extend_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, valid: Array, cache: Tree,
    first: Callable[..., Array] | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """x [B, T, D] of new tokens after those in the cache, and the new cache. `first` is the
    kernel of the platform where the cache is empty: new tokens then see each other alone."""
    start = cache["filled"]
    all_valid = jax.lax.dynamic_update_slice(cache["valid"], valid, (0, start))
    places = jnp.cumsum(all_valid, axis=1)  # [B, S]: windows are counted without padding
    query = jax.lax.dynamic_slice_in_dim(places, start, x.shape[1], axis=1)
    order = start + jnp.arange(x.shape[1])[:, None] >= jnp.arange(all_valid.shape[1])
    seen = order[None] & all_valid[:, None, :]  # [B, T, S]
    back = query[:, :, None] - places[:, None, :]

    def block(kind: str, w: Tree, x: Array, kv: Tree) -> tuple[Array, Tree]:
        new: Tree = {}

        def attend(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            for name, array in (("k", k), ("v", v)):  # [B, S, K, H]
                new[name] = jax.lax.dynamic_update_slice(kv[name], array, (0, start, 0, 0))
            if first is not None:
                return first(q, k, v, valid.astype(jnp.int32), scoring)
            mask = seen if scoring.window is None else seen & (back < scoring.window)
            return cached_attention(q, new["k"], new["v"], mask, scoring)

        x, _ = _applied(layer, kind, w, x, tables, Attend(attend, valid))
        return x, new

    kv: Tree = {}
    for span in spans:
        blocks = [partial(block, kind) for kind in span.kinds]
        x, kv[span.name] = run_stack_cached(blocks, w[span.name], x, cache["kv"][span.name])
    return x, {"kv": kv, "valid": all_valid, "filled": start + valid.shape[1]}
