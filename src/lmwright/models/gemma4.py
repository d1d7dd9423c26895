"""Gemma 4 (https://huggingface.co/collections/google/gemma-4): the text model.

    x --+--> norm --> attention --> norm --+--> norm --> mlp --> norm --+--> input --> times s
        +----------------------------------^ +--------------------------^

    local    heads of head_dim look through a window
    global   heads of global_head_dim look at the whole row; their keys can be values, too
    shared   the last layers have no keys and values: they look at those of the last layer of
             their reach that has some, which is called kept

What each layer reads of its token besides the residual stream, P numbers, comes from a table and
from the embedding, for all L layers together:

    tokens --> token_inputs --+--> inputs [L, B, T, P]
    x 0    --> input_proj ----+
                                    x + norm(input_out(gelu(input_gate(x)) * inputs of the layer))
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from pydantic import Field

from lmwright.config.run import NonNegativeInt, Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Attention, Batch, Work, seen_keys
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux, Span, added
from lmwright.core.weight import dot, lookup, name_result
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models.block import (
    OutNorm,
    attention_spec,
    feed_forward,
    into_stream,
    mlp_spec,
    output,
)
from lmwright.models.decoder import Decoder, Head, LayerReach, reaches
from lmwright.models.experts import EXPERT_SCALE, Experts
from lmwright.models.layers import Attend, Kernel, run_layers
from lmwright.models.soft_cap import SoftCapped
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import GatedMlp, gated
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope, rope_tables
from lmwright.nn.unit_norm import unit_norm

KEPT, SHARED = "kept", "shared"
"""Kinds of layers whose keys and values others look at, and of those others."""
INTO_HEADS = {"q": "btd,dnh->btnh", "k": "btd,dkh->btkh", "v": "btd,dkh->btkh"}


@dataclass(frozen=True)
class TwoWidths(Attention):
    """Attention whose heads have another width in layers without a window."""

    global_head_dim: int = 0

    def keys(self, seq_len: int) -> float:
        """Keys that a query sees, summed over layers, those of global ones times their width over
        `head_dim`."""
        wide = self.global_head_dim / self.head_dim
        return sum(seen_keys(w, seq_len) * (1.0 if w else wide) for w in self.windows)


@section
class Gemma4(SoftCapped):
    """A decoder of the Gemma 4 family; its fields are the model."""

    normed_branches: ClassVar = ("o", "down", "input_out")
    qk_norm: ClassVar = "head"

    kind: Literal["gemma4"] = "gemma4"
    mlp_dim: PositiveInt
    window: PositiveInt
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[LayerReach, ...] = (*("local",) * 5, "global")
    """Reach of each layer; the pattern repeats over all layers."""
    global_head_dim: PositiveInt = 512
    """Width of a head in global layers."""
    global_kv_heads: PositiveInt | None = None
    """Heads of keys and values in global layers; num_kv_heads if unset."""
    global_values: Literal["own", "keys"] = "own"
    """What global layers have as values: a projection of their own, or that of the keys."""
    num_shared_layers: NonNegativeInt = 0
    """Last layers, which look at keys and values of layers before them."""
    shared_mlp_dim: PositiveInt | None = None
    """Width of the mlp in those layers; mlp_dim if unset."""
    layer_input_dim: PositiveInt | None = None
    """Numbers that each layer reads of its token besides the residual stream; none if unset."""
    logits_soft_cap: Positive | None = None  # type: ignore[misc]
    """Bound on the magnitude of logits."""
    local_rope_theta: Positive = 10_000.0
    """Theta of local layers, which are not scaled."""
    rope_theta: Positive = 1_000_000.0
    norm_eps: Positive = 1e-6
    mlp: Annotated[GatedMlp, Field(description="Gate of the feed-forward.")] = "geglu"
    head: Head = "tied"

    def __post_init__(self) -> None:
        own, shared = self._own_and_shared()
        if missing := sorted(set(shared) - set(own)):
            raise UserError(
                f"model.num_shared_layers: {self.num_shared_layers} of {self.num_layers} leave no "
                f"{missing[0]} layer with keys and values of its own; choose fewer"
            )
        super().__post_init__()
        _ = self.wide  # whose heads are checked as those of local layers
        if self.shared_mlp_dim is not None and not shared:
            raise UserError(
                "model.shared_mlp_dim: has no effect without model.num_shared_layers; leave it out"
            )

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    @property
    def reaches(self) -> tuple[LayerReach, ...]:
        """The reach of each layer."""
        return reaches(self.layer_pattern, self.num_layers)

    def _own_and_shared(self) -> tuple[tuple[LayerReach, ...], tuple[LayerReach, ...]]:
        """The reach of each layer with keys and values of its own, and of each without."""
        own = max(0, self.num_layers - self.num_shared_layers)
        return self.reaches[:own], self.reaches[own:]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its reach, and whether it gives or takes keys and values."""
        own, shared = self._own_and_shared()
        kinds: list[str] = list(own)
        for reach in set(shared):
            last = len(own) - 1 - own[::-1].index(reach)
            kinds[last] = f"{reach} {KEPT}"
        return (*kinds, *(f"{reach} {SHARED}" for reach in shared))

    def window_of(self, kind: str) -> int | None:
        """Tokens that queries of such a layer look at, themselves included; None for all."""
        return super().window_of(_reach(kind))

    @property
    def wide(self) -> Decoder:
        """The model with the heads of its global layers in all layers."""
        heads = self.global_kv_heads or self.num_kv_heads
        if (heads, self.global_head_dim) == (self.num_kv_heads, self.head_dim):
            return self
        try:
            return replace(self, num_kv_heads=heads, head_dim=self.global_head_dim,
                           global_kv_heads=None)  # fmt: skip
        except UserError as error:
            text = str(error).replace("num_kv_heads", "global_kv_heads")
            raise UserError(text.replace("model.head_dim", "model.global_head_dim")) from None

    def _heads(self, kind: str) -> Decoder:
        """The model with the heads of such a layer."""
        return self.wide if _reach(kind) == "global" else self

    @property
    def heads_text(self) -> str:
        """The model's heads in words."""
        wide = self.wide
        return f"{super().heads_text}, global ones {wide.num_kv_heads} kv heads of {wide.head_dim}"

    def spec(self) -> Tree:
        """Every weight, once."""
        spec = super().spec()
        if (width := self.layer_input_dim) is None:
            return spec
        all_layers, d = self.num_layers * width, self.embed_dim
        return spec | {
            "token_inputs": Param(
                "vocab -> embed", (self.vocab_size, all_layers), std=self.embed_std
            ),
            "input_proj": Param("embed -> mlp", (d, all_layers)),
            "input_norm": Param("norm", (width,), fill=1.0),
        }

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        model, d, shared = self._heads(kind), self.embed_dim, kind.endswith(SHARED)
        heads = attention_spec(model)
        if shared or (self.global_values == "keys" and _reach(kind) == "global"):
            del heads["v"]
        if shared:
            del heads["k"]
        mlp_dim = (self.shared_mlp_dim if shared else None) or self.mlp_dim
        layer = heads | mlp_spec(self, mlp_dim)
        layer |= {f"{n}_norm": Param("head_dim", (model.head_dim,), fill=1.0)
                  for n in ("q", "k") if n in heads}  # fmt: skip
        for branch in ("attention", "mlp"):
            for norm in ("norm", "out_norm"):
                layer[f"{branch}_{norm}"] = Param("norm", (d,), fill=1.0)
        if (width := self.layer_input_dim) is not None:
            layer["input_gate"] = Param("embed -> mlp", (d, width))
            layer["input_out"] = Param("mlp -> embed", (width, d))
            layer["input_out_norm"] = Param("norm", (d,), fill=1.0)
        return layer | {"layer_scale": Param("gates", (1,), fill=1.0)}

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        x = super().embedded(w, tokens, compute)
        return x * jnp.asarray(self.embed_dim**0.5, x.dtype)

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        local = rope_tables(positions, self.head_dim, self.local_rope_theta)
        return {"local": local, "global": Decoder.tables(self.wide, positions, length)}

    def hidden_by(
        self, kernel: Kernel, w: Tree, batch: Batch, compute: Compute
    ) -> tuple[Array, Aux]:
        """`hidden` by any attention that takes what `select.self_attention` does."""
        x = self.embedded(w, batch.tokens, compute)
        tables = self.tables(batch.positions, batch.tokens.shape[1])
        cut, join = select.pieces_of_rows(self, x, tables, compute, kernel)
        w = self.with_inputs(w, batch.tokens, x, cut)
        x, tables = cut(x), jax.tree.map(cut, tables)
        total: Aux = {}
        for span in self.spans:
            x, aux = run_layers(self.layer, (span,), w, x, tables, batch, compute, kernel)
            kept = {name: aux.pop(name) for name in list(aux) if KEPT in name}
            tables, total = tables | kept, added(total, aux)
        return self.stream_norm(w, join(x)), total

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention, mlp and the layer's input; of a kept layer keys and values
        beside it."""
        reach, norm = _reach(kind), self._norm
        h = norm(x, w["attention_norm"])
        names = [name for name in INTO_HEADS if name in w]
        heads = dict(zip(names, dots(h, *((INTO_HEADS[n], w[n]) for n in names)), strict=True))
        q = constrain(heads["q"], "batch seq heads head_dim")
        q = name_result(apply_rope(norm(q, w["q_norm"]), tables[reach]))
        if kind.endswith(SHARED):
            k, v = (tables[name] for name in _kept(reach))
        else:
            k, v = heads["k"], heads.get("v", heads["k"])
            k = name_result(apply_rope(norm(k, w["k_norm"]), tables[reach]))
            v = unit_norm(v, self.norm_eps)
        h = attend(q, k, v, Scoring(1.0, self.window_of(kind)))
        h = constrain(output(w, h), "batch stream embed")
        x = constrain(x + norm(h, w["attention_out_norm"]), "batch stream embed")
        h, aux = self.ffn(w, x, attend)
        x = constrain(x + h, "batch stream embed")
        if self.layer_input_dim is not None:
            h = gated(self.mlp, dot("btd,df->btf", x, w["input_gate"]), w["inputs"])
            h = constrain(dot("btf,fd->btd", h, w["input_out"]), "batch stream embed")
            x = constrain(x + norm(h, w["input_out_norm"]), "batch stream embed")
        x = x * lax.stop_gradient(w["layer_scale"]).astype(x.dtype)  # no training changes it
        kept = dict(zip(_kept(reach), (k, v), strict=True)) if kind.endswith(KEPT) else {}
        return x, aux | kept

    def ffn(self, w: Tree, x: Array, attend: Attend) -> tuple[Array, Aux]:
        """The feed-forward of x [B, T, D], between its norms, and sums over real tokens."""
        h, chunk = self._norm(x, w["mlp_norm"]), attend.mlp_chunk_tokens
        return feed_forward(self.mlp, w, h, chunk, OutNorm("mlp_out_norm", self._norm)), {}

    def _norm(self, x: Array, scale: Array) -> Array:
        return rms_norm(x, scale, self.norm_eps)

    def with_inputs(
        self, w: Tree, tokens: Array, x: Array, cut: Callable[[Array], Array] = select.unchanged
    ) -> Tree:
        """The weights, and beside those of each layer what it reads of tokens [B, T], whose
        embedding is x [B, T, D]; `cut` is for rows in pieces."""
        if (width := self.layer_input_dim) is None:
            return w
        by_layer = (*x.shape[:2], self.num_layers, width)
        named = lookup(w["token_inputs"], tokens, x.dtype) * jnp.asarray(width**0.5, x.dtype)
        seen = dot("btd,df->btf", x, w["input_proj"]) * jnp.asarray(self.embed_dim**-0.5, x.dtype)
        seen = self._norm(seen.reshape(by_layer), w["input_norm"])
        both = (seen + named.reshape(by_layer)) * jnp.asarray(2**-0.5, x.dtype)
        inputs = jnp.stack([cut(both[:, :, i]) for i in range(self.num_layers)])
        return w | {span.name: _with_inputs(span, w[span.name], inputs) for span in self.spans}

    def tables_after(self, span: Span, states: Tree, tables: Tree) -> Tree:
        """Tables of the layers behind a span: with keys and values from the state of a kept
        layer."""
        kind = span.kinds[0].kind
        if not kind.endswith(KEPT):
            return tables
        (state,) = states if isinstance(states, list) else [jax.tree.map(lambda a: a[0], states)]
        return tables | dict(zip(_kept(_reach(kind)), (state["k"], state["v"]), strict=True))

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of keys and values of a layer; a shared one has none."""
        if kind.endswith(SHARED):
            return {}
        model = self._heads(kind)
        return Decoder.state(model, kind, batch_size=batch_size, length=length, dtype=dtype)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


@section
class Gemma4Moe(Gemma4):
    """Gemma 4 with experts beside the mlp of every layer.

    x --+--> norm --> mlp -------> norm --+--> norm -->
        +--> norm --> experts ---> norm --+
        +--> unit norm --> router         the shares of experts, each times a number of its own
    """

    kind: Literal["gemma4-moe"] = "gemma4-moe"  # type: ignore[assignment]
    experts: Annotated[Experts, Field(description="Experts beside the mlp of the layers.")]

    @property
    def mixtures(self) -> dict[str, Experts]:
        """Experts of the layers, by prefix of their statistics."""
        return {"router": self.experts, **super().mixtures}

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        norms = ("mlp_branch_norm", "experts_norm", "experts_out_norm", "router_scale")
        return {
            **super().layer_spec(kind),
            **self.experts.spec(self.mlp, self.embed_dim, into_stream(self)),
            **{name: Param("norm", (self.embed_dim,), fill=1.0) for name in norms},
            EXPERT_SCALE: Param("experts", (self.experts.num_experts,), fill=1.0),
        }

    def ffn(self, w: Tree, x: Array, attend: Attend) -> tuple[Array, Aux]:
        """The feed-forward of x [B, T, D], between its norms, and what the router did."""
        h, chunk = self._norm(x, w["mlp_norm"]), attend.mlp_chunk_tokens
        h = feed_forward(self.mlp, w, h, chunk, OutNorm("mlp_branch_norm", self._norm))
        routed = unit_norm(x.astype(jnp.float32), self.norm_eps) * w["router_scale"]
        y, aux = self.experts.run(
            self.mlp, w, self._norm(x, w["experts_norm"]), attend.real, chunk,
            routed * self.embed_dim**-0.5,
        )  # fmt: skip
        y = constrain(y, "batch stream embed")
        h = constrain(h + self._norm(y, w["experts_out_norm"]), "batch stream embed")
        return self._norm(h, w["mlp_out_norm"]), aux


def _reach(kind: str) -> LayerReach:
    return "global" if kind.startswith("global") else "local"


def _kept(reach: LayerReach) -> tuple[str, str]:
    """Names of the keys and values of the kept layer of a reach."""
    return f"{reach} {KEPT} k", f"{reach} {KEPT} v"


def _with_inputs(span: Span, layers: Tree, inputs: Array) -> Tree:
    """The weights of a span, stacked or a list of layers, with their part of inputs [L, B, T, P]
    beside them."""
    places = [numbers for _, _, numbers in span.places()]

    def beside(w: Tree, own: list[Array]) -> Tree:
        if len(own) == 1:
            return w | {"inputs": own[0]}
        return {str(i): w[str(i)] | {"inputs": a} for i, a in enumerate(own)}

    if isinstance(layers, list):
        return [beside(w, [inputs[n[i]] for n in places]) for i, w in enumerate(layers)]
    return beside(layers, [inputs[n.start : n.stop : n.step] for n in places])


@lru_cache(256)
def _work(model: Gemma4, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    of: Any = work.attention
    attention = TwoWidths(of.windows, of.num_heads, of.num_kv_heads, of.head_dim,
                          global_head_dim=model.global_head_dim)  # fmt: skip
    active = dict(work.active)
    if model.layer_input_dim is not None:
        active["token_inputs"] = 0.0
    alone = model.num_shared_layers or model.layer_input_dim
    return replace(
        work, attention=attention, active=active, uncut=("stage",) if alone else work.uncut
    )
