"""Layers with Mamba-2 (https://arxiv.org/abs/2405.21060) in the place of attention.

    x --> norm --> in --> z, x b c, dt
    x b c --> conv --> SiLU --> x, b, c --(dt)--> state space, plus skip * x
          --> times silu(z) --> norm --> out

z, x, b, c and dt come of one matrix, as LoRA's factors and released files have it. Over
`mesh.tensor` its parts are cut apart, which moves weights.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.contract import Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot
from lmwright.errors import UserError
from lmwright.kernels.ssd_by import ssd
from lmwright.models.block import into_stream
from lmwright.models.decoder import Decoder, repeated
from lmwright.models.fused import parts
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm
from lmwright.nn.causal_conv import causal_conv, conv_from
from lmwright.nn.delta_rule import empty
from lmwright.nn.norm import rms_norm
from lmwright.nn.ssd import gates, ssd_from

MAMBA = "mamba"
Mixer = Literal["mamba", "full"]
KEPT, MOVES = 6.5, 6.0  # how often numbers around convolutions are kept, and moved forward


@section
class Mamba(PreNorm):
    """A decoder of which some layers have Mamba-2 in the place of attention."""

    mixer: ClassVar[str] = "state spaces and attention"

    mixer_pattern: tuple[Mixer, ...] = ("mamba", "mamba", "mamba", "full")
    """Mixer of each layer, Mamba-2 or full attention; the pattern repeats over all layers."""
    mamba_num_heads: PositiveInt = 64
    """Heads of Mamba layers, each with a memory: a multiple of `mamba_num_groups`."""
    mamba_head_dim: PositiveInt = 64
    """Width of these heads."""
    mamba_state_dim: PositiveInt = 128
    """Numbers that a memory keeps for each of a head's."""
    mamba_num_groups: PositiveInt = 1
    """Groups of heads that write and read their memories by the same vectors."""
    conv_tokens: Annotated[int, Field(ge=2)] = 4
    """Tokens that a convolution sees, the token itself included."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens that a Mamba layer computes together; between chunks goes a memory. The results do
    not depend on it, but time and memory do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, groups = self.mamba_num_heads, self.mamba_num_groups
        if heads % groups:
            raise UserError(
                f"model.mamba_num_heads: {heads} is not a multiple of model.mamba_num_groups = "
                f"{groups}; use a multiple, such as {groups * max(1, round(heads / groups))}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its mixer."""
        return repeated("mixer_pattern", self.mixer_pattern, self.num_layers, '["mamba", "full"]')

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention: none."""
        return (None,) * self.kinds.count("full")

    @property
    def num_memories(self) -> int:
        """Number of layers with Mamba-2."""
        return self.kinds.count(MAMBA)

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        rows, width = self.mamba_state_dim, self.mamba_head_dim
        return f"{super().heads_text} or {self.mamba_num_heads} memories of {rows} x {width}"

    @property
    def inner_dim(self) -> int:
        """Width of all heads of a Mamba layer."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def written_dim(self) -> int:
        """Width of the vectors that write to memories and read from them, of all groups."""
        return 2 * self.mamba_num_groups * self.mamba_state_dim

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of Mamba-2, or of attention."""
        if kind != MAMBA:
            return super().mixer_spec(kind)
        d, n, taps = self.embed_dim, self.mamba_num_heads, self.conv_tokens
        convolved = self.inner_dim + self.written_dim
        std = into_stream(self) * self.inner_dim**-0.5
        return {
            "mamba_in": Param("embed -> heads", (d, self.inner_dim + convolved + n)),
            "conv": Param("heads blocks", (convolved, taps), std=(3 * taps) ** -0.5),
            "conv_bias": Param("heads", (convolved,), fill=0.0),
            # steps over what the paper's code draws from: memories of 1000 tokens to less than one
            "a_log": Param("heads", (n,), fill=0.0, fill_to=2.77),
            "dt_bias": Param("heads", (n,), fill=-6.9, fill_to=-2.25),
            "skip": Param("heads", (n,), fill=1.0),
            "memory_norm": Param("heads", (self.inner_dim,), fill=1.0),
            "mamba_out": Param("heads -> embed", (self.inner_dim, d), std=std),
        }

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: keys and values, or the last tokens of its convolution
        and float32 memories, of the same size for any `length`."""
        if kind != MAMBA:
            return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)
        last = (batch_size, self.conv_tokens - 1, self.inner_dim + self.written_dim)
        sizes = batch_size, self.mamba_num_heads, self.mamba_state_dim, self.mamba_head_dim
        memory = jax.eval_shape(lambda: empty(*sizes))
        return {"conv": jax.ShapeDtypeStruct(last, dtype), "memory": memory}

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that Mamba-2 or attention adds to x [B, T, D]."""
        if kind != MAMBA:
            return super().mixed(kind, w, x, tables, attend)
        return self._mamba(w, self.attention_input(w, x), attend)

    def _mamba(self, w: Tree, h: Array, attend: Attend) -> Array:
        """[B, T, D] of normed h [B, T, D]."""
        inner, size = self.inner_dim, self.chunk_tokens
        gate, x, written, dt = self._projected(w, h)
        steps = gates(dt, w["a_log"], w["dt_bias"], attend.ids)  # [B, T, N]
        taps = jnp.moveaxis(w["conv"], -1, 0)[::-1]  # that of the token itself first
        bias = w["conv_bias"]

        def whole() -> Array:
            near, to_memory = (
                causal_conv(a, taps[:, at], bias[at], attend.ids)
                for a, at in ((x, slice(inner)), (written, slice(inner, None)))
            )
            near, c, b = self._inputs(near, to_memory)
            by_head = self._by_head(near)
            y = ssd(c, b, by_head, *steps, attend.ids, size, kernels=attend.kernels)
            return self._skipped(w, y, near)

        def on(state: Tree) -> tuple[Array, Tree]:
            both = jnp.concatenate([x, written], axis=2)
            both, conv = conv_from(state["conv"], both, taps, bias, attend.real)
            near, c, b = self._inputs(*jnp.split(both, [inner], axis=2))
            inputs = c, b, self._by_head(near), *steps, attend.ids
            y, memory = ssd_from(state["memory"], *inputs, chunk_tokens=size)
            return self._skipped(w, y, near), {"conv": conv, "memory": memory}

        y = attend.carry(whole, on)
        return dot("btn,nd->btd", self._gated(w, y, gate), w["mamba_out"])

    def _projected(self, w: Tree, h: Array) -> tuple[Array, Array, Array, Array]:
        """Gate and x [B, T, N H], b and c of all groups, dt [B, T, N], of normed h [B, T, D]."""
        cuts = [self.inner_dim, 2 * self.inner_dim]
        gate, x, rest = parts("btd,dn->btn", before_products(h), w, "mamba_in", cuts)
        gate, x = (constrain(a, "batch seq heads") for a in (gate, x))
        written, dt = jnp.split(rest, [self.written_dim], axis=2)
        return gate, x, written, dt

    def _by_head(self, x: Array) -> Array:
        """[B, T, N, H] of all heads' numbers."""
        by_head = x.reshape(*x.shape[:2], self.mamba_num_heads, self.mamba_head_dim)
        return constrain(by_head, "batch seq heads head_dim")

    def _inputs(self, x: Array, written: Array) -> tuple[Array, Array, Array]:
        """x [B, T, N H], c and b [B, T, G, K] of what the convolutions give."""
        b, c = jnp.split(jax.nn.silu(written), 2, axis=2)
        groups = (*x.shape[:2], self.mamba_num_groups, self.mamba_state_dim)
        return jax.nn.silu(x), c.reshape(groups), b.reshape(groups)

    def _skipped(self, w: Tree, y: Array, x: Array) -> Array:
        """y [B, T, N, H], and x [B, T, N H] itself by a factor of each head; as x."""
        return y.reshape(x.shape) + jnp.repeat(w["skip"].astype(x.dtype), y.shape[3]) * x

    def _gated(self, w: Tree, y: Array, gate: Array) -> Array:
        """y [B, T, N H] times its gate, normed over the heads of each group."""
        wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return self._normed(w, wide).astype(y.dtype)

    def _normed(self, w: Tree, wide: Array) -> Array:
        """float32 [B, T, N H], normed over the heads of each group."""
        apart = (*wide.shape[:2], self.mamba_num_groups, -1)
        scale = w["memory_norm"].reshape(self.mamba_num_groups, -1)
        return rms_norm(wide.reshape(apart), scale, self.norm_eps).reshape(wide.shape)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


@lru_cache(256)
def _work(model: Mamba, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    if not (layers := model.num_memories):
        return work
    chunk = min(model.chunk_tokens, seq_len)
    rows, width, convolved = (
        model.mamba_state_dim, model.inner_dim, model.inner_dim + model.written_dim
    )  # fmt: skip
    # the memory read and written; tokens before in a chunk, half of it on average
    memory = width * (4.0 * rows + chunk) + model.mamba_num_groups * chunk * rows
    more: dict[str, Any] = {} if model.windows else {"attention": None}
    return replace(
        work,
        mixing_flops=layers * (memory + 2.0 * model.conv_tokens * convolved),
        mixing_kept=layers * (KEPT * convolved + 2.0 * width),
        mixing_bytes=4.0 * layers * (MOVES * convolved + 2.0 * width * rows / chunk),
        **more,
    )
