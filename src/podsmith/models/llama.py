"""The llama family (https://arxiv.org/abs/2302.13971): pre-norm blocks, rotary positions,
grouped kv heads (https://arxiv.org/abs/2305.13245), a gated or plain MLP.

    x --+--> norm --> attention --+--> norm --> mlp --+-->
        +-------------------------^ +-----------------^

Biases as in Qwen 2, per-head q and k norms as in Qwen 3 are fields, not other models.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from podsmith.core.batch import Batch
from podsmith.core.dtypes import Compute
from podsmith.core.param import Param, Tree
from podsmith.core.pattern import spans
from podsmith.core.sharding import constrain
from podsmith.core.stack import Aux
from podsmith.core.weight import GATE, dot, kept, lookup
from podsmith.errors import UserError
from podsmith.models.decoder import (
    Attend,
    Spans,
    cache_positions,
    extend_layers,
    layers_spec,
    new_cache,
    run_layers,
)
from podsmith.models.llama_hf import LlamaHf
from podsmith.nn.mlp import GATED, Mlp, activate, gated
from podsmith.nn.norm import rms_norm
from podsmith.nn.rope import apply_rope, rope_tables
from podsmith.run import STRICT, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A decoder of the llama family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["llama"] = "llama"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    mlp: Mlp = "swiglu"
    """Gated (swiglu, geglu with tanh, reglu) or plain (relu, relu2) feed-forward."""
    head: Literal["tied", "untied"] = "tied"
    """Whether the output head is the embedding table."""
    qk_norm: Literal["none", "head"] = "none"
    """RMS norm of q and k over head_dim."""
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    """Which projections add a bias."""
    embed_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh embeddings."""

    hf: ClassVar[LlamaHf] = LlamaHf()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads: {self.num_heads} is not a multiple of "
                f"model.num_kv_heads = {self.num_kv_heads}; make it one"
            )
        if self.head_dim % 2:
            raise UserError(f"model.head_dim: {self.head_dim} is odd; rotary positions need pairs")

    def spec(self) -> Tree:
        """Every weight, once."""
        d, v = self.embed_dim, self.vocab_size
        spec = {
            "embed": Param("vocab -> embed", (v, d), std=self.embed_std),
            **layers_spec(self.spans, lambda kind: self._layer_spec()),
            "norm": Param("norm", (d,), fill=1.0),
        }
        if self.head == "untied":
            spec["head"] = Param("embed -> vocab", (d, v))
        return spec

    def _layer_spec(self) -> Tree:
        d, f, n, k, h = (
            self.embed_dim, self.mlp_dim, self.num_heads, self.num_kv_heads, self.head_dim,
        )  # fmt: skip
        residual = (2 * self.num_layers) ** -0.5  # keeps the residual stream's scale (GPT-2)
        layer = {
            "attention_norm": Param("norm", (d,), fill=1.0),
            "q": Param("embed -> heads head_dim", (d, n, h)),
            "k": Param("embed -> kv_heads head_dim", (d, k, h)),
            "v": Param("embed -> kv_heads head_dim", (d, k, h)),
            "o": Param("heads head_dim -> embed", (n, h, d), std=residual * (n * h) ** -0.5),
            "mlp_norm": Param("norm", (d,), fill=1.0),
            "up": Param("embed -> mlp", (d, f)),
            "down": Param("mlp -> embed", (f, d), std=residual * f**-0.5),
        }
        if self.mlp in GATED:
            layer["gate"] = Param("embed -> mlp", (d, f))
        if self.qk_norm == "head":
            layer |= {name: Param("head_dim", (h,), fill=1.0) for name in ("q_norm", "k_norm")}
        if self.bias != "none":
            layer["q_bias"] = Param("heads head_dim", (n, h), fill=0.0)
            layer |= {b: Param("kv_heads head_dim", (k, h), fill=0.0) for b in ("k_bias", "v_bias")}
        if self.bias in ("attention", "all"):
            layer["o_bias"] = Param("norm", (d,), fill=0.0)
        if self.bias == "all":
            layer |= {f"{m}_bias": Param("mlp", (f,), fill=0.0) for m in self._mlp_inputs}
            layer["down_bias"] = Param("norm", (d,), fill=0.0)
        return layer

    @property
    def _mlp_inputs(self) -> tuple[str, ...]:
        return ("gate", "up") if self.mlp in GATED else ("up",)

    @property
    def spans(self) -> Spans:
        """All layers are of one kind."""
        return spans(("layer",) * self.num_layers)

    def hidden(self, w: Tree, batch: Batch, how: Compute) -> tuple[Array, Aux]:
        """Residual stream after the final norm, [B, T, D] in the compute dtype, and
        auxiliary losses (none here)."""
        x = self._embed(w, batch.tokens, how)
        tables = rope_tables(batch.positions, self.head_dim, self.rope_theta)
        x, aux = run_layers(self._layer, self.spans, w, x, tables, batch, how)
        return rms_norm(x, w["norm"], self.norm_eps), aux

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return {"head": w["head"]} if self.head == "untied" else {"embed": w["embed"]}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        if self.head == "untied":
            return dot("btd,dv->btv", hidden, w["head"], out_dtype=jnp.float32)
        return dot("btd,vd->btv", hidden, w["embed"], out_dtype=jnp.float32)

    def new_cache(self, batch_size: int, length: int, how: Compute) -> Tree:
        """Empty kv cache for `length` tokens a row."""
        return new_cache(self.spans, batch_size, length, self.num_kv_heads, self.head_dim, how)

    def extend(
        self, w: Tree, tokens: Array, valid: Array, cache: Tree, how: Compute
    ) -> tuple[Array, Tree]:
        """hidden [B, T, D] of new tokens [B, T] after those in the cache, and the new cache.

        `valid` [B, T] is False at (left) padding, which is never attended to and counts
        for no position. The caller sees to it that the cache is long enough.
        """
        tables = rope_tables(cache_positions(valid, cache), self.head_dim, self.rope_theta)
        x = self._embed(w, tokens, how)
        x, cache = extend_layers(self._layer, self.spans, w, x, tables, valid, cache)
        return rms_norm(x, w["norm"], self.norm_eps), cache

    def _embed(self, w: Tree, tokens: Array, how: Compute) -> Array:
        return constrain(lookup(w["embed"], tokens, how.dtype), "batch stream embed")

    def _qkv(self, w: Tree, x: Array, tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        h = rms_norm(x, w["attention_norm"], self.norm_eps)
        q = constrain(_with_bias(dot("btd,dnh->btnh", h, w["q"]), w, "q"),
                      "batch seq heads head_dim")  # fmt: skip
        k = _with_bias(dot("btd,dkh->btkh", h, w["k"]), w, "k")
        v = _with_bias(dot("btd,dkh->btkh", h, w["v"]), w, "v")
        if self.qk_norm == "head":
            q = rms_norm(q, w["q_norm"], self.norm_eps)
            k = rms_norm(k, w["k_norm"], self.norm_eps)
        return kept(apply_rope(q, tables)), kept(apply_rope(k, tables)), v

    def _layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        q, k, v = self._qkv(w, x, tables)
        h = attend(q, k, v, self.head_dim**-0.5)  # [B, T, N, H]
        x = constrain(x + _with_bias(dot("btnh,nhd->btd", h, w["o"]), w, "o"), "batch stream embed")
        h = rms_norm(x, w["mlp_norm"], self.norm_eps)
        up = constrain(_with_bias(dot("btd,df->btf", h, w["up"]), w, "up"), "batch seq mlp")
        if self.mlp in GATED:
            gate = _with_bias(dot("btd,df->btf", h, w["gate"], name=GATE), w, "gate")
            h = gated(self.mlp, gate, up)
        else:
            h = activate(self.mlp, up)
        x = x + _with_bias(dot("btf,fd->btd", h, w["down"]), w, "down")
        return constrain(x, "batch stream embed"), {}


def _with_bias(y: Array, w: Tree, name: str) -> Array:
    bias: Any = w.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)
