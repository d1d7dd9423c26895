"""The layer of decoders with experts, which their families fill in.

x --+--> norm --> attention (queries and keys as the family has them) --+-->
    +-------------------------------------------------------------------^
x --+--> norm --> experts, or a plain mlp in `dense_layers` ------------+-->
    +-------------------------------------------------------------------^
"""

from collections.abc import Callable
from typing import Any

from jax import Array

from podsmith.core.param import Param, Tree
from podsmith.core.sharding import constrain
from podsmith.core.stack import Aux
from podsmith.core.weight import kept
from podsmith.errors import UserError
from podsmith.models.block import (
    Bias,
    attention_spec,
    embedding_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
)
from podsmith.models.decoder import Attend, check_decoder, layers_spec
from podsmith.models.experts import expert_layer, experts_spec
from podsmith.nn.norm import rms_norm
from podsmith.nn.rope import apply_rope

DENSE, MOE = "dense", "moe"


def moe_kinds(num_layers: int, dense_layers: tuple[int, ...] = ()) -> tuple[str, ...]:
    """The kind of each layer: with experts, or with a plain mlp."""
    return tuple(DENSE if i in dense_layers else MOE for i in range(num_layers))


def check_moe(model: Any) -> None:
    """Raises UserError where a model's fields do not go together."""
    check_decoder(model)
    dense = getattr(model, "dense_layers", ())
    if list(dense) != sorted(set(dense)) or any(not 0 <= i < model.num_layers for i in dense):
        raise UserError(
            f"model.dense_layers: {list(dense)} must be numbers of layers from 0 to "
            f"{model.num_layers - 1}, in order, none twice"
        )
    if len(dense) == model.num_layers:
        raise UserError("model.dense_layers: names every layer; use a model without experts")


def moe_spec(model: Any, bias: Bias = "none", qk_norms: Tree | None = None) -> Tree:
    """Every weight; `qk_norms` are those of the norms of queries and keys."""

    def layer(kind: str) -> Tree:
        spec = attention_spec(model, bias) | (qk_norms or {})
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


def moe_layer(
    model: Any,
    kind: str,
    w: Tree,
    x: Array,
    tables: tuple[Array, Array],
    attend: Attend,
    normed: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda *qkv: qkv,
    window: int | None = None,
) -> tuple[Array, Aux]:
    """x [B, T, D] after attention and experts; `normed` is what becomes of queries, keys and
    values before queries and keys are rotated."""
    q, k, v = normed(*project(w, rms_norm(x, w["attention_norm"], model.norm_eps)))
    q, k = kept(apply_rope(q, tables)), kept(apply_rope(k, tables))
    h = attend(q, k, v, model.head_dim**-0.5, window=window)  # [B, T, N, H]
    x = constrain(x + output(w, h), "batch stream embed")
    h = rms_norm(x, w["mlp_norm"], model.norm_eps)
    if kind == DENSE:
        y, aux = feed_forward(model.mlp, w, h), {}
    else:
        y, aux = expert_layer(model.experts, model.mlp, w, h, attend.real)
    return constrain(x + y, "batch stream embed"), aux
