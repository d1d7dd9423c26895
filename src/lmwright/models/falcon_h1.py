"""Falcon-H1 (https://arxiv.org/abs/2507.22448): every layer has Mamba-2 and attention beside each
other, and a multiplier wherever numbers pass, by which a learning rate found on small models fits
large ones (https://arxiv.org/abs/2203.03466).

    x --+--> norm --+--> mamba ------+--+--> norm --> mlp --+-->
        |           +--> attention --^  ^ +-----------------^
        +-------------------------------+
"""

from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import GATE, OPERAND, Compute
from lmwright.core.fanout import dots
from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot, name_result
from lmwright.models import block
from lmwright.models.chunked import chunked
from lmwright.models.granite import times
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.mamba import MAMBA, Mamba
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import gated

BOTH, FULL = "both", "full"
OfParts = tuple[Positive, Positive, Positive, Positive, Positive]


@section
class FalconH1(Mamba):
    """A decoder of the Falcon-H1 family; its fields are the model."""

    mixer: ClassVar[str] = "state spaces beside attention"
    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    mixer_pattern: ClassVar[Any] = (BOTH,)  # type: ignore[misc]

    kind: Literal["falcon-h1"] = "falcon-h1"
    mlp_dim: PositiveInt
    rope_theta: Positive = 1e11
    mamba_num_heads: PositiveInt = 24
    """Heads of Mamba-2 in each layer, each with a memory: a multiple of `mamba_num_groups`."""
    mamba_state_dim: PositiveInt = 256
    """Numbers that a memory keeps for each of a head's."""
    mamba_norm: Literal["none", "before", "behind"] = "behind"
    """RMS norm of what is read from memories: before its gate, behind it, or none."""
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias, beside those of Mamba-2, which have none."""
    embedding_multiplier: Positive = 1.0
    """Factor on embeddings."""
    attention_in_multiplier: Positive = 1.0
    """Factor on what attention reads."""
    key_multiplier: Positive = 1.0
    """Factor on keys."""
    attention_out_multiplier: Positive = 1.0
    """Factor on what attention gives."""
    ssm_in_multiplier: Positive = 1.0
    """Factor on what Mamba-2 reads."""
    ssm_multipliers: OfParts = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on gates, inputs, what writes to memories, what reads from them, and steps."""
    ssm_out_multiplier: Positive = 1.0
    """Factor on what Mamba-2 gives."""
    mlp_multipliers: tuple[Positive, Positive] = (1.0, 1.0)
    """Factors on the gates of the mlp and on what it gives."""
    lm_head_multiplier: Positive = 1.0
    """Factor on logits."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer: none."""
        return (None,) * self.num_layers

    @property
    def num_memories(self) -> int:
        """Number of layers with Mamba-2: all."""
        return self.num_layers

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        return super().heads_text.replace(" or ", " beside ")

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of attention and of Mamba-2."""
        spec = super().mixer_spec(FULL) | super().mixer_spec(MAMBA)
        if self.mamba_norm == "none":
            del spec["memory_norm"]
        return spec

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: keys and values, the last tokens of its convolution and
        memories."""
        of = partial(super().state, batch_size=batch_size, length=length, dtype=dtype)
        return of(FULL) | of(MAMBA)

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return times(super().embedded(w, tokens, compute), self.embedding_multiplier)

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that Mamba-2 and attention add to x [B, T, D]."""
        h = self.attention_input(w, x)
        q, k, v = block.project(w, times(h, self.attention_in_multiplier))
        q, k = map(name_result, self.rotated(q, times(k, self.key_multiplier), tables))
        found = block.output(w, attend(q, k, v, Scoring(self.score_scale)))
        remembered = times(self._mamba(w, h, attend), self.ssm_out_multiplier)
        return remembered + times(found, self.attention_out_multiplier)

    def _projected(self, w: Tree, h: Array) -> tuple[Array, Array, Array, Array]:
        """Gate, x, b and c, and dt, of normed h [B, T, D], with their multipliers."""
        gate, x, written, dt = super()._projected(w, h)
        z, x_, b, c, d = (self.ssm_in_multiplier * each for each in self.ssm_multipliers)
        both = jnp.repeat(jnp.asarray([b, c], jnp.float32), self.written_dim // 2)
        written = (written.astype(jnp.float32) * both).astype(written.dtype)
        return times(gate, z), times(x, x_), written, times(dt, d)

    def _gated(self, w: Tree, y: Array, gate: Array) -> Array:
        """y [B, T, N H] times its gate, and its norm, in their order."""
        wide, gate = y.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        if self.mamba_norm == "before":
            return (self._normed(w, wide) * gate).astype(y.dtype)
        wide = wide * gate
        return (self._normed(w, wide) if self.mamba_norm == "behind" else wide).astype(y.dtype)

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> LayerResult:
        """[B, T, D] of h [B, T, D]."""
        run = partial(_mlp, self.mlp_multipliers)
        return chunked(run, block.MLP_WEIGHTS, w, h, attend.mlp_chunk_tokens), {}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        return super().logits(w, hidden) * self.lm_head_multiplier


def _mlp(multipliers: tuple[float, float], w: Tree, h: Array) -> Array:
    """The mlp of h [B, T, D], with factors on its gates and its result."""
    h, wide = before_products(h), "btd,df->btf"
    up, gate = dots(h, (wide, w["up"]), (wide, w["gate"], GATE))
    up = constrain(block.with_bias(up, w, "up"), "batch seq mlp")
    gate = times(block.with_bias(gate, w, "gate"), multipliers[0])
    h = name_result(gated("swiglu", gate, up), OPERAND)
    return times(block.with_bias(dot("btf,fd->btd", h, w["down"]), w, "down"), multipliers[1])
