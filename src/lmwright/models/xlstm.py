"""xLSTM (https://arxiv.org/abs/2405.04517) with the blocks of xLSTM-7B
(https://arxiv.org/abs/2503.13427): no attention, but a memory of constant size in each layer.

    x --+--> norm --> mLSTM --+--> norm --> mlp --+-->
        +---------------------^ +-----------------^

    h --> q, k, v, input and forget gate of each head --> memory --> norm of each head
      --> output gate --> times --> o

Rows have no positions; what is lost with distance, the forget gates decide.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import HEADS, Compute
from lmwright.core.contract import Batch, Work
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, dot, name_result
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models.block import feed_forward, mlp_spec, output
from lmwright.models.decoder import Decoder, Head
from lmwright.models.layers import Attend
from lmwright.models.soft_cap import SoftCapped
from lmwright.nn.for_all import times
from lmwright.nn.layer_norm import layer_norm
from lmwright.nn.mlp import GatedMlp
from lmwright.nn.mlstm import empty, mlstm_from
from lmwright.nn.norm import rms_norm
from lmwright.nn.soft_cap import soft_capped

# how often a chunk's memory, its scores and what its tokens read are moved in a forward pass, by
# what the TPU compiler says: in the kernel, of chunks of 256, and in products by themselves
KERNEL_MOVES, MOVES = (1.0, 0.5, 5.0), (9.0, 24.0, 0.0)
KERNEL_CHUNKS = range(64, 513, 64)
GATES = ("input_gate", "forget_gate")


@section
class Recurrent(Decoder):
    """All that decoders with memories of constant size have in common: tokens without positions,
    chunks, and the weights that they start with."""

    num_kv_heads: ClassVar[None] = None  # type: ignore[misc, assignment]
    rope_theta: ClassVar[None] = None  # type: ignore[misc, assignment]
    rope_scaling: ClassVar[None] = None  # type: ignore[misc]
    embed_std: ClassVar[None] = None  # type: ignore[misc, assignment]
    reasoning: ClassVar[None] = None  # type: ignore[misc]

    chunk_tokens: int

    @property
    def small_std(self) -> float:
        """Standard deviation of fresh weights that read the stream (arXiv 1910.05895)."""
        return (2 / (5 * self.embed_dim)) ** 0.5

    @property
    def stream_std(self) -> float:
        """Standard deviation of fresh weights that write to the stream."""
        return 2 / (self.num_layers * self.embed_dim**0.5)

    def spec(self) -> Tree:
        """Every weight, once."""
        spec = super().spec()
        for name in ("embed", "head") if self.head == "untied" else ("embed",):
            spec[name] = replace(spec[name], std=self.small_std)
        return spec

    def fresh_mlp(self, mlp_dim: int) -> Tree:
        """gate, up and down of a layer, with the spread of their fresh weights."""
        stds = {"gate": self.small_std, "up": self.small_std, "down": self.stream_std}
        spec = mlp_spec(self, mlp_dim)
        return {name: replace(spec[name], std=std) for name, std in stds.items()}

    def tables(self, positions: Array, length: int) -> Tree:
        """Nothing: tokens have no positions."""
        return ()

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D], by the platform's mLSTM."""
        return self.hidden_by(select.mlstm(compute), w, batch, compute)

    def chunk_of(self, seq_len: int) -> int:
        """Tokens of a chunk in rows of `seq_len`. Raises UserError where chunks do not divide
        them."""
        chunk = min(self.chunk_tokens, seq_len)
        if seq_len % chunk:
            fit = max(size for size in range(1, chunk) if seq_len % size == 0)
            raise UserError(
                f"model.chunk_tokens: {chunk} does not divide the {seq_len} tokens of a row; use "
                f"{fit} or another divisor"
            )
        return chunk


@section
class Xlstm(Recurrent, SoftCapped):
    """A decoder of the xLSTM family; its fields are the model."""

    mixer: ClassVar[str] = "mLSTM"

    kind: Literal["xlstm"] = "xlstm"
    mlp_dim: PositiveInt
    key_dim: PositiveInt
    """Width of the queries and keys of a head; `head_dim` is that of its values."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens that meet each other by products of matrices; between chunks goes a memory. The
    results do not depend on it, but time and memory do."""
    gate_soft_cap: Positive = 15.0
    """Bound on the magnitude of what goes into input and forget gates."""
    logits_soft_cap: Positive | None = 30.0  # type: ignore[misc]
    """Bound on the magnitude of logits."""
    norm_eps: Positive = 1e-6
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
    head: Head = "untied"

    def __post_init__(self) -> None:
        """Nothing: its fields go together in every way."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return ("mlstm",) * self.num_layers

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        return f"{self.num_heads} heads with memories of {self.key_dim} x {self.head_dim}"

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, n, k, h = self.embed_dim, self.num_heads, self.key_dim, self.head_dim
        return {
            "mlstm_norm": Param("norm", (d,), fill=1.0),
            **{name: Param("embed -> heads head_dim", (d, n, size), std=self.small_std)
               for name, size in (("q", k), ("k", k), ("v", h))},
            "output_gate": Param("embed -> heads head_dim", (d, n, h), fill=0.0),
            "input_gate": Param("embed -> heads", (d, n), fill=0.0),
            "input_gate_bias": Param("heads", (n,), fill=-10.0),
            "forget_gate": Param("embed -> heads", (d, n), fill=0.0),
            "forget_gate_bias": Param("heads", (n,), fill=3.0, fill_to=6.0),
            "memory_norm": Param("heads head_dim", (n, h), fill=1.0),
            "o": Param("heads head_dim -> embed", (n, h, d), std=self.stream_std),
            "mlp_norm": Param("norm", (d,), fill=1.0),
            **self.fresh_mlp(self.mlp_dim),
        }  # fmt: skip

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of a layer's memory, float32 and of the same size for any `length`."""
        return jax.eval_shape(
            lambda: empty(batch_size, self.num_heads, self.key_dim, self.head_dim)
        )

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after mLSTM and mlp."""
        h = before_products(rms_norm(x, w["mlstm_norm"], self.norm_eps))
        x = constrain(x + self._mixed(w, h, attend), "batch stream embed")
        h = rms_norm(x, w["mlp_norm"], self.norm_eps)
        h = feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return constrain(x + h, "batch stream embed"), {}

    def _mixed(self, w: Tree, x: Array, attend: Attend) -> Array:
        """[B, T, D] of normed x [B, T, D]."""
        by_head = "btd,dnh->btnh"
        *qkv, gate = dots(x, *((by_head, w[name]) for name in ("q", "k", "v", "output_gate")))
        q, k, v = (constrain(a, "batch seq heads head_dim") for a in qkv)
        i, f = (name_result(self._gate(w, x, name), HEADS) for name in GATES)
        size, ids = self.chunk_tokens, attend.ids
        h = attend.carry(
            lambda: attend.mix(q, k, v, i, f, setting=size),
            lambda memory: mlstm_from(memory, q, k, v, i, f, ids, chunk_tokens=size),
        )  # [B, T, N, H]
        unit = layer_norm(h, jnp.ones(self.head_dim), None, self.norm_eps)
        return output(w, times(jax.nn.sigmoid(gate) * unit, w["memory_norm"]))

    def _gate(self, w: Tree, x: Array, name: str) -> Array:
        """float32 [B, T, N]: what goes into a gate of each head."""
        y = dot("btd,dn->btn", x, w[name], out_dtype=jnp.float32)
        return soft_capped(y + w[f"{name}_bias"].astype(jnp.float32), self.gate_soft_cap)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`. Raises UserError where chunks do not divide it."""
        return _work(self, seq_len)


def moved_numbers(chunk: int, key_dim: int, head_dim: int) -> float:
    """float32 numbers of a token and head that mLSTM moves beside its products, forward, on a TPU
    from v4 on."""
    memory, scores, token = KERNEL_MOVES if chunk in KERNEL_CHUNKS else MOVES
    return memory * key_dim * head_dim / chunk + scores * chunk + token * (key_dim + head_dim)


@lru_cache(256)
def _work(model: Xlstm, seq_len: int) -> Work:
    chunk = model.chunk_of(seq_len)
    heads, k, h = model.num_layers * model.num_heads, model.key_dim, model.head_dim
    return Work(
        spec=model.spec(),
        seq_len=seq_len,
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        vocab_size=model.vocab_size,
        active={} if model.head == "tied" else {"embed": 0.0},
        # the memory read and written, and the tokens before in a chunk, half of it on average
        mixing_flops=heads * (4.0 * k * h + chunk * (k + h)),
        mixing_kept=heads * h,
        mixing_bytes=4.0 * heads * moved_numbers(chunk, k, h),
        # by the TPU compiler, the cap of an untied head keeps no more logits than none does
    )
