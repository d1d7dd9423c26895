"""MoeBlock: fields and layer of decoders with experts, which their families complete.

x --+--> norm --> attention (queries and keys as the family has them) --+-->
    +-------------------------------------------------------------------^
x --+--> norm --> experts, or a plain mlp in `dense_layers` ------------+-->
    +-------------------------------------------------------------------^
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import kept
from lmwright.errors import UserError
from lmwright.models.block import (
    Bias,
    attention_spec,
    embedding_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
)
from lmwright.models.decoder import Attend, Decoder, check_decoder, layers_spec
from lmwright.models.experts import Experts, expert_layer, experts_spec
from lmwright.nn.mlp import GatedMlp
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope
from lmwright.nn.rope_scaling import RopeScaling

DENSE, MOE = "dense", "moe"


@dataclass(frozen=True, kw_only=True)
class MoeDecoder(Decoder):
    """The fields of every decoder with experts. A family adds its own, `spec` and `layer`,
    and makes fields of the constants here that can be chosen in it."""

    vocab_size: PositiveInt
    embed_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    experts: Experts
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    mlp: GatedMlp = "swiglu"
    """Gated feed-forward of the experts, and of plain layers."""
    head: Literal["tied", "untied"] = "untied"
    """Whether the output head is the embedding table."""
    embed_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh embeddings."""

    window: ClassVar[int | None] = None
    dense_layers: ClassVar[tuple[int, ...]] = ()
    bias: ClassVar[Bias] = "none"

    def __post_init__(self) -> None:
        check_moe(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: with experts, or with a plain mlp."""
        return tuple(DENSE if i in self.dense_layers else MOE for i in range(self.num_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that the queries of each layer look at; None for all."""
        return (self.window,) * self.num_layers


def check_moe(model: MoeDecoder) -> None:
    """Raises UserError where a model's fields do not go together."""
    check_decoder(model)
    dense = model.dense_layers
    if list(dense) != sorted(set(dense)) or any(not 0 <= i < model.num_layers for i in dense):
        raise UserError(
            f"model.dense_layers: {list(dense)} must be numbers of layers from 0 to "
            f"{model.num_layers - 1}, in order, none twice"
        )
    if len(dense) == model.num_layers:
        raise UserError("model.dense_layers: names every layer; use a model without experts")


def moe_spec(model: MoeDecoder, qk_norms: Tree | None = None) -> Tree:
    """Every weight; `qk_norms` are those of the norms of queries and keys."""

    def layer(kind: str) -> Tree:
        spec = attention_spec(model, model.bias) | (qk_norms or {})
        for name in ("attention_norm", "mlp_norm"):
            spec[name] = Param("norm", (model.embed_dim,), fill=1.0)
        if kind == DENSE:
            return spec | mlp_spec(model)
        scale = (2 * model.num_layers) ** -0.5
        return spec | experts_spec(model.experts, model.mlp, model.embed_dim, scale)

    return {
        **embedding_spec(model),
        **layers_spec(model.spans, layer),
        "norm": Param("norm", (model.embed_dim,), fill=1.0),
    }


def head_norms(model: MoeDecoder) -> Tree:
    """The norms of queries and keys in each head, for `moe_spec`."""
    return {name: Param("head_dim", (model.head_dim,), fill=1.0) for name in ("q_norm", "k_norm")}


def norm_heads(w: Tree, eps: float, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values after the norms that `head_norms` asks for."""
    return rms_norm(q, w["q_norm"], eps), rms_norm(k, w["k_norm"], eps), v


def moe_layer(
    model: MoeDecoder,
    kind: str,
    w: Tree,
    x: Array,
    tables: tuple[Array, Array],
    attend: Attend,
    normed: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda *qkv: qkv,
) -> tuple[Array, Aux]:
    """x [B, T, D] after attention and experts; `normed` is what becomes of queries, keys and
    values before queries and keys are rotated."""
    q, k, v = normed(*project(w, rms_norm(x, w["attention_norm"], model.norm_eps)))
    q, k = kept(apply_rope(q, tables)), kept(apply_rope(k, tables))
    h = attend(q, k, v, model.head_dim**-0.5, window=model.window)  # [B, T, N, H]
    x = constrain(x + output(w, h), "batch stream embed")
    h = rms_norm(x, w["mlp_norm"], model.norm_eps)
    if kind == DENSE:
        y, aux = feed_forward(model.mlp, w, h), {}
    else:
        y, aux = expert_layer(model.experts, model.mlp, w, h, attend.real)
    return constrain(x + y, "batch stream embed"), aux
