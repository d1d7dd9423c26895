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

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import HEADS
from lmwright.core.contract import Work
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, dot, name_result
from lmwright.errors import UserError
from lmwright.kernels.select import KERNELS
from lmwright.models.block import (
    attention_spec,
    feed_forward,
    into_stream,
    mlp_spec,
    output,
    project,
)
from lmwright.models.decoder import Decoder, Head, repeated
from lmwright.models.experts import Experts
from lmwright.models.from_zero import FromZero, norm_from_zero
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.causal_conv import causal_conv, conv_from
from lmwright.nn.delta_rule import delta_rule_from, empty, gates, unit
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope

# how often a chunk's memory, keys and values, its matrix that is inverted, and what convolutions
# read are moved in a forward pass, by what the TPU compiler says: in the kernel, of what its cycles
# would move, and in products by themselves, where small ones take as long
KERNEL_MOVES, MOVES = (0.0, 4.5, 0.0, 4.8), (27.0, 13.0, 0.12, 4.8)
KERNEL_CHUNKS = (64, 128)
Mixer = Literal["linear", "full"]


@section
class Hybrid(FromZero):
    """All of the family but the feed-forward of its layers."""

    mixer: ClassVar[str] = "delta rule and attention"
    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"

    mixer_pattern: tuple[Mixer, ...] = ("linear", "linear", "linear", "full")
    """Mixer of each layer, a linear one or full attention; the pattern repeats over all layers."""
    linear_num_key_heads: PositiveInt = 16
    """Heads of queries and keys in linear layers."""
    linear_num_value_heads: PositiveInt = 32
    """Heads of values in linear layers, each with a memory: a multiple of those of keys."""
    linear_head_dim: PositiveInt = 128
    """Width of all these heads."""
    conv_tokens: Annotated[int, Field(ge=2)] = 4
    """Tokens that a convolution sees, the token itself included."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens that a linear layer computes together; between chunks goes a memory. The results do
    not depend on it, but time and memory do."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of each head that is rotated, from its first dim on."""
    rope_theta: Positive = 10_000_000.0
    norm_eps: Positive = 1e-6
    head: Head = "untied"

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise UserError(
                f"model.linear_num_value_heads: {values} is not a multiple of "
                f"model.linear_num_key_heads = {keys}; use a multiple, such as "
                f"{keys * max(1, round(values / keys))}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its mixer."""
        return repeated("mixer_pattern", self.mixer_pattern, self.num_layers, '["linear", "full"]')

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention: none."""
        return (None,) * self.kinds.count("full")

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        values, size = self.linear_num_value_heads, self.linear_head_dim
        return f"{super().heads_text} or {values} memories of {size} x {size}"

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
        own = self._linear_spec() if kind == "linear" else self._full_spec()
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

    def _linear_spec(self) -> Tree:
        d, n, h = self.embed_dim, self.linear_num_value_heads, self.linear_head_dim
        heads, taps, std = self.mixed_heads, self.conv_tokens, into_stream(self) * (n * h) ** -0.5
        return self.linear_inputs_spec() | {
            "conv": Param("heads head_dim blocks", (heads, h, taps), std=(3 * taps) ** -0.5),
            # steps over what the paper's code draws from: memories of 1000 tokens to less than one
            "a_log": Param("heads", (n,), fill=0.0, fill_to=2.77),
            "dt_bias": Param("heads", (n,), fill=-6.9, fill_to=-2.25),
            "memory_norm": Param("head_dim", (h,), fill=1.0),
            "out": Param("heads head_dim -> embed", (n, h, d), std=std),
        }

    def linear_inputs_spec(self) -> Tree:
        """Weights of `linear_inputs`."""
        d, n, h = self.embed_dim, self.linear_num_value_heads, self.linear_head_dim
        return {
            "qkv": Param("embed -> heads head_dim", (d, self.mixed_heads, h)),
            "output_gate": Param("embed -> heads head_dim", (d, n, h)),
            "write_gate": Param("embed -> heads", (d, n)),
            "decay_gate": Param("embed -> heads", (d, n)),
        }

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: keys and values, or the last tokens of its convolution
        and float32 memories, of the same size for any `length`."""
        if kind == "full":
            return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)
        n, h = self.linear_num_value_heads, self.linear_head_dim
        last = (batch_size, self.conv_tokens - 1, self.mixed_heads, h)
        memory = jax.eval_shape(lambda: empty(batch_size, n, h, h))
        return {"conv": jax.ShapeDtypeStruct(last, dtype), "memory": memory}

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
        ids, size = attend.ids, self.chunk_tokens
        qkv, gate, write, decay = self.linear_inputs(w, before_products(x))
        qkv = constrain(qkv, "batch seq heads head_dim")
        rates = gates(write, decay, w["a_log"], w["dt_bias"], ids)  # [B, T, N]
        taps = jnp.moveaxis(w["conv"], -1, 0)[::-1]  # that of the token itself first

        def whole() -> Array:
            mixed = self._qkv(causal_conv(qkv, taps, None, ids))
            return KERNELS["delta rule"](*mixed, *rates, ids, size, kernels=attend.kernels)

        def on(state: Tree) -> tuple[Array, Tree]:
            near, conv = conv_from(state["conv"], qkv, taps, None, attend.real)
            inputs = *self._qkv(near), *rates, ids
            h, memory = delta_rule_from(state["memory"], *inputs, chunk_tokens=size)
            return h, {"conv": conv, "memory": memory}

        h = rms_norm(attend.carry(whole, on), w["memory_norm"], self.norm_eps)  # [B, T, N, H]
        return dot("btnh,nhd->btd", h * jax.nn.silu(gate), w["out"])

    def linear_inputs(self, w: Tree, x: Array) -> tuple[Array, Array, Array, Array]:
        """Inputs of the memory, of x [B, T, D]: what is convolved, queries and keys of G heads
        before values of N [B, T, 2 G + N, H]; the gate of the output [B, T, N, H]; those of writing
        and decay, float32 [B, T, N]."""
        by_head = "btd,dnh->btnh"
        qkv, gate = dots(x, (by_head, w["qkv"], HEADS), (by_head, w["output_gate"]))
        narrow = (dot("btd,dn->btn", x, w[name], out_dtype=jnp.float32)
                  for name in ("write_gate", "decay_gate"))  # fmt: skip
        write, decay = (name_result(a, HEADS) for a in narrow)
        return qkv, gate, write, decay

    def _qkv(self, near: Array) -> tuple[Array, Array, Array]:
        """Queries and keys [B, T, G, H], and values [B, T, N, H], of what the convolution gives."""
        keys = self.linear_num_key_heads
        q, k, v = jnp.split(jax.nn.silu(near), (keys, 2 * keys), axis=2)
        return unit(q), unit(k), constrain(v, "batch seq heads head_dim")

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


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


@lru_cache(256)
def _work(model: Hybrid, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    if not (layers := model.kinds.count("linear")):
        return work
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    h, chunk = model.linear_head_dim, min(model.chunk_tokens, seq_len)
    # the memory read twice and written; tokens before in a chunk, half of it on average, and the
    # triangular matrix that is inverted
    memory = values * (6.0 * h * h + 2 * chunk * h + chunk**2 / 3) + keys * 2 * chunk * h
    of_memory, token, inverse, near = KERNEL_MOVES if chunk in KERNEL_CHUNKS else MOVES
    moved = values * (of_memory * h * h / chunk + token * 2 * h + inverse * chunk**2)
    moved += near * model.mixed_heads * h
    more: dict[str, Any] = {} if layers < model.num_layers else {"attention": None}
    return replace(
        work,
        mixing_flops=layers * (memory + 2.0 * model.conv_tokens * model.mixed_heads * h),
        mixing_kept=layers * h * (values + 6.5 * model.mixed_heads),  # and around convolutions
        mixing_bytes=4.0 * layers * moved,
        **more,
    )
