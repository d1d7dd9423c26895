"""Qwen3.5 (https://huggingface.co/collections/Qwen/qwen35): in three of four layers a gated delta
rule (https://arxiv.org/abs/2412.06464) in the place of attention, in the others attention with a
gate.

    x --+--> norm --> linear or full --+--> norm --> mlp --+-->       norms times 1 + weight
        +------------------------------^ +-----------------^

    linear   qkv --> conv --> SiLU --> q, k of length 1, v --> delta rule --> norm of each head
             --> times silu(output gate) --> out
    full     q and gate, k, v --> norms of q and k, part of a head rotated --> attention
             --> times sigmoid(gate) --> o

qkv, and q with its gate, are one matrix each, as LoRA's factors and released files have them. Over
`mesh.tensor` q, k and v of linear layers are cut apart behind the product, which moves activations.
"""

from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import HEADS
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, name_result
from lmwright.models.block import (
    attention_spec,
    feed_forward,
    into_stream,
    mlp_spec,
    output,
    project,
)
from lmwright.models.decoder import Head
from lmwright.models.delta_net import DeltaNet, write_and_decay
from lmwright.models.experts import Experts
from lmwright.models.from_zero import FromZero, norm_from_zero
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.delta_rule import gates, unit
from lmwright.nn.rope import apply_rope


@section
class Hybrid(FromZero, DeltaNet):
    """All of the family but the feed-forward of its layers."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"

    linear_num_key_heads: PositiveInt = 16
    """Heads of queries and keys in linear layers."""
    linear_num_value_heads: PositiveInt = 32
    """Heads of values in linear layers, each with a memory: a multiple of those of keys."""
    linear_head_dim: PositiveInt = 128
    """Width of all these heads."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of each head that is rotated, from its first dim on."""
    rope_theta: Positive = 10_000_000.0
    norm_eps: Positive = 1e-6
    head: Head = "untied"

    @property
    def memory_dims(self) -> tuple[int, int]:
        """Widths of a key and of a value in linear layers."""
        return self.linear_head_dim, self.linear_head_dim

    @property
    def convolved(self) -> dict[str, tuple[int, int]]:
        """Heads, and their width, that the filters of each name see."""
        return {"conv": (self.mixed_heads, self.linear_head_dim)}

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def mixed_heads(self) -> int:
        """Heads of queries, keys and values together in linear layers."""
        return 2 * self.linear_num_key_heads + self.linear_num_value_heads

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        linear = kind == "linear"
        own = self.linear_inputs_spec() | self.memory_spec() if linear else self._full_spec()
        norms = {
            f"{branch}_norm": norm_from_zero("norm", self.embed_dim)
            for branch in ("attention", "mlp")
        }
        return own | norms | self.ffn_spec()

    def ffn_spec(self) -> Tree:
        """Weights of a layer's feed-forward."""
        raise NotImplementedError

    def ffn(self, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and sums over real tokens."""
        raise NotImplementedError

    def _full_spec(self) -> Tree:
        spec, size = attention_spec(self), self.head_dim
        spec["q"] = Param("embed -> heads head_dim", (self.embed_dim, self.num_heads, 2 * size))
        return spec | {name: norm_from_zero("head_dim", size) for name in ("q_norm", "k_norm")}

    def linear_inputs_spec(self) -> Tree:
        """Weights of `linear_inputs`."""
        d, n, h = self.embed_dim, self.linear_num_value_heads, self.linear_head_dim
        return {
            "qkv": Param("embed -> heads head_dim", (d, self.mixed_heads, h)),
            "output_gate": Param("embed -> heads head_dim", (d, n, h)),
            "write_gate": Param("embed -> heads", (d, n)),
            "decay_gate": Param("embed -> heads", (d, n)),
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after its mixer and feed-forward."""
        h = self._norm(x, w["attention_norm"])
        h = self._linear(w, h, attend) if kind == "linear" else self._full(w, h, tables, attend)
        x = constrain(x + h, "batch stream embed")
        h, aux = self.ffn(w, self._norm(x, w["mlp_norm"]), attend)
        return constrain(x + h, "batch stream embed"), aux

    def _full(self, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] of normed x [B, T, D]."""
        q, k, v = project(w, x)
        q, gate = jnp.split(q, 2, axis=-1)  # [B, T, N, H] each
        q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k = (name_result(apply_rope(a, tables)) for a in (q, k))
        h = attend(q, k, v, Scoring(self.head_dim**-0.5, None))
        return output(w, h * jax.nn.sigmoid(gate))

    def _linear(self, w: Tree, x: Array, attend: Attend) -> Array:
        """[B, T, D] of normed x [B, T, D]."""
        qkv, gate, write, decay = self.linear_inputs(w, before_products(x))
        qkv = constrain(qkv, "batch seq heads head_dim")
        rates = gates(write, decay, w["a_log"], w["dt_bias"], attend.ids)  # [B, T, N]
        return self.remembered(w, {"conv": qkv}, gate, rates, self._qkv, attend, self.norm_eps)

    def linear_inputs(self, w: Tree, x: Array) -> tuple[Array, Array, Array, Array]:
        """Inputs of the memory, of x [B, T, D]: what is convolved, queries and keys of G heads
        before values of N [B, T, 2 G + N, H]; the gate of the output [B, T, N, H]; those of writing
        and decay, float32 [B, T, N]."""
        by_head = "btd,dnh->btnh"
        qkv, gate = dots(x, (by_head, w["qkv"], HEADS), (by_head, w["output_gate"]))
        return qkv, gate, *write_and_decay(w, x)

    def _qkv(self, near: Array) -> tuple[Array, Array, Array]:
        """Queries and keys [B, T, G, H], and values [B, T, N, H], of what the convolution gives."""
        keys = self.linear_num_key_heads
        q, k, v = jnp.split(jax.nn.silu(near), (keys, 2 * keys), axis=2)
        return unit(q), unit(k), constrain(v, "batch seq heads head_dim")


@section
class Qwen35(Hybrid):
    """A decoder of the Qwen3.5 family; its fields are the model."""

    kind: Literal["qwen3-5"] = "qwen3-5"
    mlp_dim: PositiveInt

    def ffn_spec(self) -> Tree:
        """Weights of the mlp."""
        return mlp_spec(self, self.mlp_dim)

    def ffn(self, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D]."""
        return feed_forward("swiglu", w, h, attend.mlp_chunk_tokens), {}


@section
class HybridMoe(Hybrid):
    """The layers with experts, and shared ones of which a token takes a part."""

    experts: Annotated[Experts, Field(description="Feed-forward of the layers.")]

    @property
    def mixtures(self) -> dict[str, Experts]:
        """Experts of the layers, by prefix of their statistics."""
        return {"router": self.experts, **super().mixtures}

    def ffn_spec(self) -> Tree:
        """Weights of the experts."""
        return self.experts.spec("swiglu", self.embed_dim, into_stream(self))

    def ffn(self, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        return self.experts.run("swiglu", w, h, attend.real, attend.mlp_chunk_tokens)


@section
class Qwen35Moe(HybridMoe):
    """Qwen3.5 with experts in every layer."""

    kind: Literal["qwen3-5-moe"] = "qwen3-5-moe"
