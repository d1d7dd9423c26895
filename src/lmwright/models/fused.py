"""Products with a matrix that is several in one, such as those of queries, keys and values, or of a
gate and what it multiplies."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import OPERAND
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot, name_result
from lmwright.models.block import mlp_spec, with_bias
from lmwright.models.chunked import chunked
from lmwright.models.decoder import Decoder
from lmwright.nn.for_all import plus
from lmwright.nn.mlp import GatedMlp, gated


def parts(
    eqn: str, h: Array, w: Tree, name: str, cuts: Sequence[int], axis: int = 0
) -> list[Array]:
    """The projection `name` of h [B, T, D], cut along an axis of its outputs. An array is cut
    before the product, since a TPU copies what is cut from its result."""
    leaf, bias = w[name], w.get(f"{name}_bias")
    if not isinstance(leaf, Array):
        return jnp.split(with_bias(dot(eqn, h, leaf), w, name), cuts, axis=axis + 2)
    outputs = dots(h, *((eqn, part) for part in jnp.split(leaf, cuts, axis=axis + 1)))
    if bias is None:
        return list(outputs)
    biases = jnp.split(bias, cuts, axis=axis)
    return [plus(y, b) for y, b in zip(outputs, biases, strict=True)]


def fused_mlp_spec(model: Decoder, mlp_dim: int) -> Tree:
    """Gate and up of a layer's mlp as one matrix, and down."""
    d = model.embed_dim
    gate_up = Param("embed -> gate_up mlp", (d, 2, mlp_dim))
    return {"gate_up": gate_up, "down": mlp_spec(model, mlp_dim)["down"]}


def fused_feed_forward(mlp: GatedMlp, w: Tree, h: Array, chunk_tokens: int | None) -> Array:
    """The feed-forward of h [B, T, D] by the weights of `fused_mlp_spec`, `chunk_tokens` of each
    row at a time if set."""
    axes = {"gate_up": "embed gate_up mlp", "down": "mlp embed"}
    return chunked(partial(_fused_feed_forward, mlp), axes, w, h, chunk_tokens)


def _fused_feed_forward(mlp: GatedMlp, w: Tree, h: Array) -> Array:
    each = parts("btd,dgf->btgf", before_products(h), w, "gate_up", [1])  # [B, T, 1, F] each
    gate, up = (constrain(a[:, :, 0], "batch seq mlp") for a in each)
    h = name_result(gated(mlp, gate, up), OPERAND)
    return dot("btf,fd->btd", h, w["down"])
