"""Reasoning layers: a mixture of small experts, added to the residual stream after every n-th
layer of any decoder.

    x --> layer n --+---------------------------------+--> layer n + 1
                    +--> norm --> experts by share ---^
                           |                    (their last product starts at zero:
                           +--> router           a decoder that is given them is unchanged)

A kind of layer that has one is a `Reasoned` kind; the families do not see it. Shares are a
softmax over all experts, or over the best `experts_per_token`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import NonNegative, PositiveInt, section
from lmwright.core.compute import GATE
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import dot
from lmwright.errors import UserError
from lmwright.models.experts import EXPERT, ROUTER, Experts, part, refuse_more
from lmwright.models.layers import Attend, Layer, LayerKind, LayerResult, Plain
from lmwright.nn.mlp import gated
from lmwright.nn.norm import rms_norm

PREFIX = "reasoning_"


@section
class Reasoning:
    """A mixture of small gated experts after every n-th layer."""

    every: PositiveInt = 4
    """Number of layers from one reasoning layer to the next."""
    num_experts: PositiveInt = 8
    mlp_dim: PositiveInt = 1024
    """Width of one expert."""
    experts_per_token: PositiveInt | None = None
    """Experts that a token goes to; all of them if unset."""
    balance_loss: NonNegative = 0.0
    """Weight of the load-balance loss, where experts are chosen."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log of the router's softmax sum, where experts are chosen."""

    def __post_init__(self) -> None:
        refuse_more(self.experts_per_token or 1, self.num_experts, "reasoning")
        if self.experts_per_token is None and (self.balance_loss or self.z_loss):
            name = "balance_loss" if self.balance_loss else "z_loss"
            raise UserError(
                f"model.reasoning.{name}: has no effect where every token goes to all experts; "
                f"set model.reasoning.experts_per_token"
            )

    @property
    def experts(self) -> Experts:
        """Settings of the reasoning layers as a section of experts."""
        return Experts(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token or self.num_experts,
            mlp_dim=self.mlp_dim,
            balance_loss=self.balance_loss,
            z_loss=self.z_loss,
        )

    def among(self, kinds: Sequence[str], embed_dim: int, norm_eps: float) -> tuple[LayerKind, ...]:
        """The kinds of a model's layers, every n-th with a reasoning layer. Raises UserError where
        there is none."""
        if self.every > len(kinds):
            raise UserError(
                f"model.reasoning.every: {self.every} is more than the {len(kinds)} layers; "
                f"lower it or drop model.reasoning"
            )
        add = lambda kind: Reasoned(kind, self, embed_dim, norm_eps)  # noqa: E731
        return tuple((Plain if i % self.every else add)(kind) for i, kind in enumerate(kinds, 1))


@dataclass(frozen=True)
class Reasoned:
    """A kind of layer with a reasoning layer after it."""

    kind: str
    reasoning: Reasoning
    embed_dim: int
    norm_eps: float

    def spec(self, spec_of: Callable[[str], Tree]) -> Tree:
        """The weights of the layer's kind, by `spec_of`, and those of the reasoning layer."""
        own = self.reasoning.experts.spec("swiglu", self.embed_dim, 1.0)
        own["norm"] = Param("norm", (self.embed_dim,), fill=1.0)
        own[f"{EXPERT}down"] = replace(own[f"{EXPERT}down"], std=None, fill=0.0)
        return spec_of(self.kind) | {f"{PREFIX}{name}": param for name, param in own.items()}

    def run(self, layer: Layer, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """The result of `layer`, then of the reasoning layer."""
        x, aux = layer(self.kind, w, x, tables, attend)
        w = part(w, PREFIX)
        h = rms_norm(x, w["norm"], self.norm_eps)
        if self.reasoning.experts_per_token is None:
            return constrain(x + all_experts(w, h), "batch stream embed"), aux
        y, sums = self.reasoning.experts.run("swiglu", w, h, attend.real)
        sums = {name.replace(ROUTER, PREFIX[:-1], 1): value for name, value in sums.items()}
        return constrain(x + y, "batch stream embed"), aux | sums


def all_experts(w: Tree, h: Array) -> Array:
    """[B, T, D] of h [B, T, D]: every token goes to every expert."""
    logits = dot("btd,de->bte", h.astype(jnp.float32), w[ROUTER])
    shares = jax.nn.softmax(logits, axis=-1)
    wide = "btd,edf->btef"
    up, gate = dots(h, (wide, w[f"{EXPERT}up"]), (wide, w[f"{EXPERT}gate"], GATE))
    inner = gated("swiglu", gate, constrain(up, "batch seq experts mlp"))
    inner = inner * shares[..., None].astype(inner.dtype)
    return dot("btef,efd->btd", inner, w[f"{EXPERT}down"])
