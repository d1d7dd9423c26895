"""Decoder: what causal decoders share. Layers run over whole rows, or continue those in a kv cache.

    family: layer(kind, weights, x, tables, attend) -> (x, aux)
                                            |
    run_layers      attend = the platform's kernel, inside segments
    extend_layers   attend = new keys and values put into the cache, all of it looked at

Kinds of layers and their order are the family's; see `core.pattern`. `Decoder` is the rest of
a family whose layers attend to keys and values of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.batch import Batch
from lmwright.core.compute import Compute
from lmwright.core.contract import Work
from lmwright.core.param import Tree, stack
from lmwright.core.pattern import Span, spans
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux, added, apart, run_stack, run_stack_cached
from lmwright.core.weight import dot, lookup
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models.counts import decoder_work
from lmwright.models.experts import penalty
from lmwright.models.hf import TableOf
from lmwright.models.reasoning import Reasoning, reasoned, run_whole, whole_spec
from lmwright.nn.attention import cached_attention
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import rope_tables
from lmwright.nn.rope_scaling import LongRope


@dataclass(frozen=True)
class Attend:
    """attend(q [B, T, N, H], k and v [B, T, K, H], scale, *, window=None, soft_cap=None)."""

    run: Callable[..., Array]
    real: Array
    """bool [B, T]: False at padding."""

    def __call__(self, *args: Any, **masks: Any) -> Array:
        return self.run(*args, **masks)


Layer = Callable[[str, Tree, Array, Tree, Attend], tuple[Array, Aux]]
Spans = tuple[Span, ...]
Reach = Literal["local", "global"]
"""Whether a layer looks through the model's window or at the whole row."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """All of a causal decoder but most of its fields, `spec` and `layer`.

    Reads the fields num_layers, num_heads, num_kv_heads, head_dim, rope_theta, rope_scaling,
    window, norm_eps and head, and the weights embed, norm and head.
    """

    hf: ClassVar[TableOf] = TableOf()
    """The family's table of Hugging Face names."""

    reasoning: Reasoning | None = None
    """Small experts beside the decoder's own layers, after every few of them."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: here its reach."""
        return reaches(self.layer_pattern if self.window else ("global",), self.num_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that the queries of each layer look at, themselves included; None for all."""
        return tuple(self.window if kind == "local" else None for kind in self.kinds)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.head_dim

    @property
    def spans(self) -> Spans:
        """The layers as they are stacked."""
        return spans(reasoned(self, self.kinds))

    def work(self, seq_len: int) -> Work:
        """What a token of a row of `seq_len` costs."""
        return decoder_work(self, seq_len)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after one layer, and sums over tokens beside it."""
        raise NotImplementedError

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return constrain(lookup(w["embed"], tokens, compute.dtype), "batch stream embed")

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, as every layer sees them."""
        return rope_tables(
            positions, self.rotary_dim, self.rope_theta, self.rope_scaling, length=length
        )

    def last_norm(self, w: Tree, x: Array) -> Array:
        """The residual stream as the head sees it."""
        return rms_norm(x, w["norm"], self.norm_eps)

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D] in the compute dtype, and what the
        layers return beside it."""
        x = self.embedded(w, batch.tokens, compute)
        tables = self.tables(batch.positions, batch.tokens.shape[1])
        x, aux = run_layers(self.layer, self.spans, w, x, tables, batch, compute)
        return self.last_norm(w, x), aux

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return {"head": w["head"]} if self.head == "untied" else {"embed": w["embed"]}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        if self.head == "untied":
            return dot("btd,dv->btv", hidden, w["head"], out_dtype=jnp.float32)
        return dot("btd,vd->btv", hidden, w["embed"], out_dtype=jnp.float32)

    def new_cache(self, batch_size: int, length: int, compute: Compute) -> Tree:
        """Empty kv cache for `length` tokens a row."""
        return new_cache(self.spans, batch_size, length, self.num_kv_heads, self.head_dim, compute)

    def layers_apart(self, w: Tree) -> Tree:
        """The weights with each span's layers as a list, for `extend` with `compute.unroll`."""
        return w | {span.name: apart(w[span.name]) for span in self.spans}

    def extend(
        self,
        w: Tree,
        tokens: Array,
        valid: Array,
        cache: Tree,
        compute: Compute,
        *,
        first: bool = False,
    ) -> tuple[Array, Tree]:
        """hidden [B, T, D] of new tokens [B, T] after those in the cache, and the new cache.
        `first`: there are none in it.

        `valid` [B, T] is False at (left) padding, which is never attended to and counts
        for no position. The caller sees to it that the cache is long enough.
        """
        tables = self.tables(cache_positions(valid, cache), cache["valid"].shape[1])
        x = self.embedded(w, tokens, compute)
        kernel = select.causal_attention(compute) if first else None
        x, cache = extend_layers(self.layer, self.spans, w, x, tables, valid, cache, kernel)
        return self.last_norm(w, x), cache


def reaches(pattern: Sequence[Reach], num_layers: int) -> tuple[Reach, ...]:
    """The reach of each layer: the pattern over and over. Raises UserError for an empty one."""
    if not pattern:
        raise UserError('model.layer_pattern: is empty; write ["local", "global"] or leave it out')
    return tuple(pattern[i % len(pattern)] for i in range(num_layers))


def check_decoder(model: Any) -> None:
    """Raises UserError where fields that `Decoder` reads do not go together."""
    if model.num_heads % model.num_kv_heads:
        raise UserError(
            f"model.num_heads: {model.num_heads} is not a multiple of "
            f"model.num_kv_heads = {model.num_kv_heads}; use a multiple, such as "
            f"{model.num_kv_heads * max(1, round(model.num_heads / model.num_kv_heads))}"
        )
    if model.rotary_dim % 2:
        raise UserError(
            f"model.head_dim: {model.head_dim} rotates {model.rotary_dim} dims, which is odd; "
            "choose an even number"
        )
    pairs = model.rotary_dim // 2
    if isinstance(model.rope_scaling, LongRope):
        for name in ("short_factor", "long_factor"):
            count = len(getattr(model.rope_scaling, name))
            if count != pairs:
                raise UserError(
                    f"model.rope_scaling.{name}: has {count} numbers for the {pairs} pairs of a "
                    "head; give one per pair"
                )
    _ = model.kinds


def penalties(model: Any, aux: Aux) -> tuple[Array | float, dict[str, tuple[Array, Array]]]:
    """Losses that layers with experts add to the mean loss of a token, and metrics as (sum,
    weight); `aux` is what the layers returned beside the residual stream."""
    total, metrics = 0.0, {}
    for prefix, section in (("router", "experts"), ("reasoning", "reasoning")):
        if f"{prefix}_counts" in aux:
            added, new = penalty(aux, prefix, getattr(model, section))
            total, metrics = total + added, metrics | new
    return total, metrics


def layers_spec(spans: Spans, spec_of: Callable[[str], Tree]) -> dict[str, Tree]:
    """The Params of all spans, `spec_of(kind)` stacked for each place."""
    spec: dict[str, Tree] = {}
    for span in spans:
        places = [stack(whole_spec(spec_of, kind), span.repeats) for kind in span.kinds]
        spec[span.name] = _by_place(places)
    return spec


def _by_place(trees: list[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else {str(i): tree for i, tree in enumerate(trees)}


def run_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, batch: Batch, compute: Compute
) -> tuple[Array, Aux]:
    """x [B, T, D] after all layers, and the sums of what they return beside it. `tables` are
    arrays [B, ...] that every layer sees, such as rotations."""
    kernel = select.causal_attention(compute)

    def block(kind: str, w: Tree, x: Array, tables: Tree, ids: Array) -> tuple[Array, Aux]:
        def attend(q: Array, k: Array, v: Array, scale: float, **masks: Any) -> Array:
            return kernel(q, k, v, ids, scale, **masks)

        return run_whole(layer, kind, w, x, tables, Attend(attend, ids > 0))

    total: Aux = {}
    for span in spans:
        x, aux = run_stack(
            [partial(block, kind) for kind in span.kinds],
            w[span.name], x, tables, batch.segment_ids,
            remat=compute.remat, unroll=compute.unroll, num_microbatches=compute.num_microbatches,
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
    layer: Layer,
    spans: Spans,
    w: Tree,
    x: Array,
    tables: Tree,
    valid: Array,
    cache: Tree,
    first: Callable[..., Array] | None = None,
) -> tuple[Array, Tree]:
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

        def attend(
            q: Array, k: Array, v: Array, scale: float, *, window: int | None = None, **masks: Any
        ) -> Array:
            for name, array in (("k", k), ("v", v)):  # [B, S, K, H]
                new[name] = jax.lax.dynamic_update_slice(kv[name], array, (0, start, 0, 0))
            if first is not None:
                return first(q, k, v, valid.astype(jnp.int32), scale, window=window, **masks)
            mask = seen if window is None else seen & (back < window)
            return cached_attention(q, new["k"], new["v"], mask, scale, **masks)

        x, _ = run_whole(layer, kind, w, x, tables, Attend(attend, valid))
        return x, new

    kv: Tree = {}
    for span in spans:
        blocks = [partial(block, kind) for kind in span.kinds]
        x, kv[span.name] = run_stack_cached(blocks, w[span.name], x, cache["kv"][span.name])
    return x, {"kv": kv, "valid": all_valid, "filled": start + valid.shape[1]}
