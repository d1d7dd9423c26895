"""What causal decoders share: layers run over whole rows, or after those in a kv cache.

    family: layer(kind, weights, x, tables, attend) -> (x, aux)
                                            |
    run_layers      attend = the platform's kernel, inside segments
    extend_layers   attend = new keys and values put into the cache, all of it looked at

Kinds of layers and their order are the family's; see `core.pattern`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from podsmith.core.batch import Batch
from podsmith.core.dtypes import Compute
from podsmith.core.param import Tree, stack
from podsmith.core.pattern import Span
from podsmith.core.stack import Aux, run_stack, run_stack_cached
from podsmith.kernels import select
from podsmith.nn.attention import masked_attention

Attend = Callable[..., Array]
"""attend(q [B, T, N, H], k and v [B, T, K, H], scale, *, window=None, soft_cap=None)."""
Layer = Callable[[str, Tree, Array, Tree, Attend], tuple[Array, Aux]]
Spans = tuple[Span, ...]


def layers_spec(spans: Spans, spec_of: Callable[[str], Tree]) -> dict[str, Tree]:
    """The Params of all spans, `spec_of(kind)` stacked for each place."""
    spec: dict[str, Tree] = {}
    for span in spans:
        places = [stack(spec_of(kind), span.repeats) for kind in span.kinds]
        spec[span.name] = _by_place(places)
    return spec


def _by_place(trees: list[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else {str(i): tree for i, tree in enumerate(trees)}


def run_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, batch: Batch, how: Compute
) -> tuple[Array, Aux]:
    """x [B, T, D] after all layers, and the sums of what they return beside it. `tables` are
    arrays [B, ...] that every layer sees, such as rotations."""
    kernel = select.causal_attention(how)

    def block(kind: str, w: Tree, x: Array, tables: Tree, ids: Array) -> tuple[Array, Aux]:
        def attend(q: Array, k: Array, v: Array, scale: float, **masks: Any) -> Array:
            return kernel(q, k, v, ids, scale, **masks)

        return layer(kind, w, x, tables, attend)

    total: Aux = {}
    for span in spans:
        x, aux = run_stack(
            [partial(block, kind) for kind in span.kinds],
            w[span.name], x, tables, batch.segment_ids,
            remat=how.remat, unroll=how.unroll, num_microbatches=how.num_microbatches,
        )  # fmt: skip
        total |= {k: total[k] + v if k in total else v for k, v in aux.items()}
    return x, total


def new_cache(
    spans: Spans, batch_size: int, length: int, kv_heads: int, head_dim: int, how: Compute
) -> Tree:
    """Empty kv cache for `length` tokens a row."""

    def kv(span: Span) -> Tree:
        shape = (span.repeats, batch_size, length, kv_heads, head_dim)
        return {"k": jnp.zeros(shape, how.dtype), "v": jnp.zeros(shape, how.dtype)}

    return {
        "kv": {span.name: _by_place([kv(span) for _ in span.kinds]) for span in spans},
        "valid": jnp.zeros((batch_size, length), bool),
        "filled": jnp.zeros((), jnp.int32),
    }


def cache_positions(valid: Array, cache: Tree) -> Array:
    """int [B, T]: places of new tokens in their rows; padding, where `valid` [B, T] is False,
    counts for none."""
    before = jnp.sum(cache["valid"], axis=1, keepdims=True)
    return jnp.maximum(before + jnp.cumsum(valid, axis=1) - 1, 0)


def extend_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, valid: Array, cache: Tree
) -> tuple[Array, Tree]:
    """x [B, T, D] of new tokens after those in the cache, and the new cache."""
    start = cache["filled"]
    all_valid = jax.lax.dynamic_update_slice(cache["valid"], valid, (0, start))
    places = jnp.cumsum(all_valid, axis=1)  # [B, S]: windows are counted without padding
    query = jax.lax.dynamic_slice_in_dim(places, start, x.shape[1], axis=1)
    order = start + jnp.arange(x.shape[1])[:, None] >= jnp.arange(all_valid.shape[1])
    seen = order[None] & all_valid[:, None, :]  # [B, T, S]
    back = query[:, :, None] - places[:, None, :]

    def block(kind: str, w: Tree, x: Array, kv: Tree) -> tuple[Array, Tree]:
        new: Tree = {}

        def attend(
            q: Array, k: Array, v: Array, scale: float, *, window: int | None = None, **masks: Any
        ) -> Array:
            for name, array in (("k", k), ("v", v)):  # [B, S, K, H]
                new[name] = jax.lax.dynamic_update_slice(kv[name], array, (0, start, 0, 0))
            mask = seen if window is None else seen & (back < window)
            return masked_attention(q, new["k"], new["v"], mask, scale, **masks)

        x, _ = layer(kind, w, x, tables, attend)
        return x, new

    kv: Tree = {}
    for span in spans:
        blocks = [partial(block, kind) for kind in span.kinds]
        x, kv[span.name] = run_stack_cached(blocks, w[span.name], x, cache["kv"][span.name])
    return x, {"kv": kv, "valid": all_valid, "filled": start + valid.shape[1]}
