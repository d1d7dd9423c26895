"""LFM2 (https://arxiv.org/abs/2511.23404): blocks of a llama, most of which join tokens by a short
convolution between two gates in the place of attention.

    x --+--> norm --> conv or attention --+--> norm --> mlp or experts --+-->
        +---------------------------------^ +----------------------------^

    conv   one product gives b, c and u of D numbers each
           b * u --> convolution of each number over a few tokens --> times c --> product
"""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.contract import Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, dot
from lmwright.models.block import into_stream
from lmwright.models.decoder import Decoder, Head, repeated
from lmwright.models.fused import parts
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm
from lmwright.models.moe import DENSE, MOE, DenseDim, DenseLayers, MoeDecoder
from lmwright.nn.causal_conv import causal_conv, conv_from

CONV = "conv"
Mixer = Literal["conv", "full"]
MOVES = 7.0  # of D numbers of a token, forward: the gates' and the convolution's reads and writes
KEPT = 4.0  # of D numbers: b, c, u and the result of the convolution


class ShortConv(PreNorm):
    """A decoder of which some layers have a short convolution in the place of attention."""

    mixer: ClassVar[str] = "short convolutions and attention"
    conv_tokens: int
    """Tokens that a convolution sees, the token itself included."""

    def mixer_of(self, kind: str) -> str:
        """The mixer of such a layer: `conv`, or another word for attention."""
        return kind.split()[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention."""
        return tuple(self.window_of(k) for k in self.kinds if self.mixer_of(k) != CONV)

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of a convolution, or of attention."""
        if self.mixer_of(kind) != CONV:
            return super().mixer_spec(kind)
        d, taps = self.embed_dim, self.conv_tokens
        return {
            "conv_in": Param("embed -> gate_up heads", (d, 3, d)),
            "conv": Param("heads blocks", (d, taps), std=(3 * taps) ** -0.5),
            "conv_out": Param("heads -> embed", (d, d), std=into_stream(self) * d**-0.5),
        }

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: keys and values, or the last inputs of its convolution,
        of the same size for any `length`."""
        if self.mixer_of(kind) != CONV:
            return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)
        last = (batch_size, self.conv_tokens - 1, self.embed_dim)
        return {"conv": jax.ShapeDtypeStruct(last, dtype)}

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that a convolution or attention adds to x [B, T, D]."""
        if self.mixer_of(kind) != CONV:
            return super().mixed(kind, w, x, tables, attend)
        return short_conv(w, self.attention_input(w, x), attend)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


def short_conv(w: Tree, h: Array, attend: Attend) -> Array:
    """[B, T, D] of normed h [B, T, D], by the weights of `ShortConv.mixer_spec`."""
    each = parts("btd,dgn->btgn", before_products(h), w, "conv_in", [1, 2])  # [B, T, 1, D] each
    b, c, u = (constrain(a[:, :, 0], "batch seq heads") for a in each)
    taps = jnp.moveaxis(w["conv"], -1, 0)[::-1]  # that of the token itself first
    mixed = b * u

    def whole() -> Array:
        return causal_conv(mixed, taps, None, attend.ids)

    def on(state: Tree) -> tuple[Array, Tree]:
        y, after = conv_from(state["conv"], mixed, taps, None, attend.real)
        return y, {"conv": after}

    return dot("btn,nd->btd", c * attend.carry(whole, on), w["conv_out"])


@lru_cache(256)
def _work(model: ShortConv, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    layers = sum(model.mixer_of(kind) == CONV for kind in model.kinds)
    width = layers * model.embed_dim
    more: dict[str, Any] = {"attention": None} if layers == model.num_layers else {}
    return replace(
        work,
        mixing_flops=2.0 * (model.conv_tokens + 1) * width,
        mixing_kept=KEPT * width,
        mixing_bytes=4.0 * MOVES * width,
        **more,
    )


ConvTokens = Annotated[
    int, Field(ge=2, description="Tokens that a convolution sees, the token itself included.")
]
MixerPattern = Annotated[
    tuple[Mixer, ...],
    Field(description="A convolution or attention in each layer; repeats over all layers."),
]


@section
class Lfm2(ShortConv):
    """A decoder of the LFM2 family; its fields are the model."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"

    kind: Literal["lfm2"] = "lfm2"
    mlp_dim: PositiveInt
    mixer_pattern: MixerPattern = ("conv", "conv", "full")
    conv_tokens: ConvTokens = 3
    rope_theta: Positive = 1_000_000.0
    head: Head = "tied"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its mixer."""
        return mixers(self)


@section
class Lfm2Moe(ShortConv, MoeDecoder):
    """LFM2 with experts in all layers but the first: sigmoid routing, balanced by a bias."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"

    kind: Literal["lfm2-moe"] = "lfm2-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    mixer_pattern: MixerPattern = ("conv", "conv", "full")
    conv_tokens: ConvTokens = 3
    rope_theta: Positive = 1_000_000.0
    head: Head = "tied"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its mixer, and whether its mlp is plain."""
        return tuple(
            f"{mixer} {DENSE}" if i in self.dense_layers else mixer
            for i, mixer in enumerate(mixers(self))
        )

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the experts, or of a plain mlp."""
        return super().ffn_spec(DENSE if kind.endswith(DENSE) else MOE)

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        return super().ffn(DENSE if kind.endswith(DENSE) else MOE, w, h, attend)


def mixers(model: Lfm2 | Lfm2Moe) -> tuple[Mixer, ...]:
    """The mixer of each layer."""
    return repeated("mixer_pattern", model.mixer_pattern, model.num_layers, '["conv", "full"]')
