"""ModernBERT (https://arxiv.org/abs/2412.13663): an encoder of pre-norm blocks, most of which look
through a window on either side; and decoders of the same blocks, which look back alone.

    tokens --embed--> norm --> blocks --> norm --> hidden --dense--> gelu --> norm --> logits

    x --+--> norm --> attention --+--> norm --> mlp --+-->     the first block has no norm
        +-------------------------^ +-----------------^        before its attention

Local and global layers have rotations of their own. As over there, q, k and v of an encoder are one
matrix, and so are the gate and what it multiplies:

    qkv      embed -> heads head_dim     the heads of q, then those of k, then those of v
    gate_up  embed -> gate_up mlp        the gate, then what it multiplies
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.param import Param, Tree, map_params
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, dot, name_result
from lmwright.models.block import attention_spec, into_stream, output, project, with_bias
from lmwright.models.by_reach import tables_by_reach
from lmwright.models.chunked import chunked
from lmwright.models.decoder import Decoder, Head, LayerReach, reaches
from lmwright.models.fused import parts
from lmwright.models.heads import DocumentHead
from lmwright.models.layer_norms import norm_spec, normed
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import GatedMlp, activate, gated
from lmwright.nn.rope import apply_rope

FIRST = "first "  # of the kind of the first layer
MLP_WEIGHTS = {
    "gate_up": "embed gate_up mlp", "gate_up_bias": "gate_up mlp",
    "down": "mlp embed", "down_bias": "norm",
}  # fmt: skip

TRANSFORM = ("dense", "dense_bias", "head_norm", "head_norm_bias")
"""Weights of the head before its logits."""

Biased = Literal["attention", "mlp", "norm", "dense", "decoder"]
BIASES = (
    "Parts with biases: projections of attention, of the mlp, all norms, the dense layer of the "
    "head, and its logits (`decoder`)."
)
INIT_CUT = "Deviations beyond which fresh weights are drawn again;  2 in the released models."


@section
class ModernBlocks(Decoder):
    """All of the family but the projections of attention."""

    mlp_dim: PositiveInt
    window: PositiveInt
    layer_pattern: Annotated[
        tuple[LayerReach, ...],
        Field(description="Reach of each layer; the pattern repeats over all layers."),
    ] = ("global", "local", "local")
    rope_theta: Positive = 160_000.0
    local_rope_theta: Annotated[
        Positive, Field(description="Theta of local layers, which are not scaled.")
    ] = 10_000.0
    mlp: Annotated[GatedMlp, Field(description="Gate of the feed-forward.")] = "geglu_erf"
    head: Head = "tied"
    init_cut: Annotated[Positive | None, Field(description=INIT_CUT)] = None
    biases: Annotated[tuple[Biased, ...], Field(description=BIASES)] = ("decoder",)

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    @property
    def kinds(self) -> tuple[str, ...]:
        """The reach of each layer, with FIRST before that of the first."""
        first, *rest = reaches(self.layer_pattern, self.num_layers)
        return FIRST + first, *rest

    def window_of(self, kind: str) -> int | None:
        """Tokens on either side that queries of such a layer look at, themselves included."""
        return super().window_of(kind.removeprefix(FIRST))

    def spec(self) -> Tree:
        """Every weight, once."""
        spec = super().spec() | self._norm_spec("embed_norm", "norm", "head_norm")
        std, d = self.embed_std * into_stream(self), self.embed_dim
        spec["dense"] = Param("embed -> embed", (d, d), std=std)
        if self.head == "untied":
            spec["head"] = Param("embed -> vocab", (d, self.vocab_size), std=std)
        if "dense" in self.biases:
            spec["dense_bias"] = Param("norm", (d,), fill=0.0)
        if "decoder" in self.biases:
            spec["decoder_bias"] = Param("vocab", (self.vocab_size,), fill=0.0)
        cut = self.init_cut
        return map_params(lambda p: replace(p, cut=cut) if p.fill is None else p, spec)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, f, std = self.embed_dim, self.mlp_dim, self.embed_std
        out = std * into_stream(self)
        bias: Literal["attention", "none"] = "attention" if "attention" in self.biases else "none"
        spec = {
            **self._norm_spec(*(() if kind.startswith(FIRST) else ("attention_norm",)), "mlp_norm"),
            **{n: replace(p, std=out if n == "o" else std) if p.fill is None else p
               for n, p in self.mixer_spec(attention_spec(self, bias)).items()},
            "gate_up": Param("embed -> gate_up mlp", (d, 2, f), std=std),
            "down": Param("mlp -> embed", (f, d), std=out),
        }  # fmt: skip
        if "mlp" in self.biases:
            spec["gate_up_bias"] = Param("gate_up mlp", (2, f), fill=0.0)
            spec["down_bias"] = Param("norm", (d,), fill=0.0)
        return spec

    def mixer_spec(self, spec: Tree) -> Tree:
        """Weights of attention, of those with matrices of their own for q, k and v."""
        return spec

    def projected(self, w: Tree, h: Array) -> Sequence[Array]:
        """q [B, T, N, H], k and v [B, T, K, H] of h [B, T, D]."""
        return project(w, h)

    def _norm_spec(self, *names: str) -> Tree:
        return norm_spec(self.embed_dim, *names, biases="norm" in self.biases)

    def _normed(self, w: Tree, name: str, x: Array) -> Array:
        return normed(w, name, x, self.norm_eps)

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return self._normed(w, "embed_norm", super().embedded(w, tokens, compute))

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the kind of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return self._normed(w, name, x)

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        names = (*TRANSFORM, "decoder_bias")
        return super().head_weights(w) | {name: w[name] for name in names if name in w}

    def transformed(self, w: Tree, hidden: Array) -> Array:
        """The head before its logits, [..., D] of hidden [..., D]."""
        h = with_bias(dot("btd,de->bte", hidden, w["dense"]), w, "dense")
        return self._normed(w, "head_norm", activate("geglu_erf", h))

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        h = self.transformed(w, hidden)
        return with_bias(super().logits(w, before_products(h)), w, "decoder")

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        rotations = tables[kind.removeprefix(FIRST)]
        h = self._normed(w, "attention_norm", x) if "attention_norm" in w else x
        q, k, v = self.projected(w, before_products(h))
        q, k = (name_result(apply_rope(a, rotations)) for a in (q, k))
        h = attend(q, k, v, Scoring(self.head_dim**-0.5, self.window_of(kind)))
        x = constrain(x + output(w, h), "batch stream embed")
        h, run = self._normed(w, "mlp_norm", x), partial(_mlp, self.mlp)
        h = chunked(run, MLP_WEIGHTS, w, h, attend.mlp_chunk_tokens)
        return constrain(x + h, "batch stream embed"), {}


@section
class ModernBert(ModernBlocks):
    """An encoder of the ModernBERT family; its fields are the model."""

    both_ways: ClassVar[bool] = True
    # released models say "mean", which also needs no token in front
    document_head: ClassVar[DocumentHead] = DocumentHead(("mean", "cls"), TRANSFORM)

    kind: Literal["modernbert"] = "modernbert"
    window: PositiveInt = 65
    """Tokens that local layers look at on either side, the query included."""

    def mixer_spec(self, spec: Tree) -> Tree:
        """Weights of attention, with q, k and v in one."""
        heads, h = self.num_heads + 2 * self.num_kv_heads, self.head_dim
        joint = {"qkv": Param("embed -> heads head_dim", (self.embed_dim, heads, h))}
        if "q_bias" in spec:
            joint["qkv_bias"] = Param("heads head_dim", (heads, h), fill=0.0)
        return joint | {name: spec[name] for name in ("o", "o_bias") if name in spec}

    def projected(self, w: Tree, h: Array) -> Sequence[Array]:
        """q [B, T, N, H], k and v [B, T, K, H] of h [B, T, D]."""
        cuts = [self.num_heads, self.num_heads + self.num_kv_heads]
        q, k, v = parts("btd,dnh->btnh", h, w, "qkv", cuts)
        return constrain(q, "batch seq heads head_dim"), k, v


@section
class ModernBertDecoder(ModernBlocks):
    """A decoder of the same blocks, as the decoders of Ettin (https://arxiv.org/abs/2507.11412)
    are; its fields are the model."""

    kind: Literal["modernbert-decoder"] = "modernbert-decoder"
    window: PositiveInt = 64
    """Tokens that local layers look at, the query included."""


def _mlp(kind: GatedMlp, w: Tree, h: Array) -> Array:
    gate, up = parts("btd,dgf->btgf", before_products(h), w, "gate_up", [1])
    gate, up = (constrain(a[:, :, 0], "batch seq mlp") for a in (gate, up))
    return with_bias(dot("btf,fd->btd", gated(kind, gate, up), w["down"]), w, "down")
