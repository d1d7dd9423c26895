"""Parts of the blocks of decoders: projections of attention and a feed-forward, each with its
weights and its computation.

    h [B, T, D] --project--> q k v --(the family: norms, rotations)--> attend --output--> [B, T, D]
    h [B, T, D] --feed_forward--> [B, T, D]

A bias is there where the weights have one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from jax import Array

from lmwright.core.compute import GATE, OPERAND
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain, tensor_ways
from lmwright.core.weight import before_products, dot, name_result
from lmwright.kernels.select import KERNELS
from lmwright.models.decoder import Decoder, QkNorm
from lmwright.nn.mlp import GATED, Mlp, activate, gated
from lmwright.nn.norm import FOR_ALL, rms_norm

Bias = Literal["none", "qkv", "attention", "mlp", "all"]

MLP_WEIGHTS = {  # and their axes in one layer
    "gate": "embed mlp", "up": "embed mlp", "down": "mlp embed",
    "gate_bias": "mlp", "up_bias": "mlp", "down_bias": "norm", "mlp_sub_norm": "mlp",
}  # fmt: skip


class OutNorm(NamedTuple):
    """Norm of a branch, or inside of it."""

    weight: str
    """Name of its weight."""
    apply: Callable[[Array, Array], Array]
    """norm(x, weight)."""


def attention_spec(model: Decoder, bias: Bias = "none") -> Tree:
    """q, k, v and o of a layer, by the model's fields."""
    d, n, k, h = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim
    spec = {
        "q": Param("embed -> heads head_dim", (d, n, h)),
        "k": Param("embed -> kv_heads head_dim", (d, k, h)),
        "v": Param("embed -> kv_heads head_dim", (d, k, h)),
        "o": Param("heads head_dim -> embed", (n, h, d), std=into_stream(model) * (n * h) ** -0.5),
    }
    if bias in ("qkv", "attention", "all"):
        spec["q_bias"] = Param("heads head_dim", (n, h), fill=0.0)
        spec |= {b: Param("kv_heads head_dim", (k, h), fill=0.0) for b in ("k_bias", "v_bias")}
    if bias in ("attention", "all"):
        spec["o_bias"] = Param("norm", (d,), fill=0.0)
    return spec


def qk_norm_spec(model: Decoder, norm: QkNorm) -> Tree:
    """Norms of queries and keys of a layer: of each head, or of all heads together."""
    n, k, h = model.num_heads, model.num_kv_heads, model.head_dim
    if norm == "all":
        return {
            "q_norm": Param("heads head_dim", (n, h), fill=1.0),
            "k_norm": Param("kv_heads head_dim", (k, h), fill=1.0),
        }
    names = ("q_norm", "k_norm") if norm == "head" else ()
    return {name: Param("head_dim", (h,), fill=1.0) for name in names}


def mlp_spec(model: Decoder, mlp_dim: int, bias: Bias = "none") -> Tree:
    """gate (where the mlp has one), up and down of a layer, by the model's fields."""
    d, f = model.embed_dim, mlp_dim
    inputs = ("gate", "up") if model.mlp in GATED else ("up",)
    spec = {name: Param("embed -> mlp", (d, f)) for name in inputs}
    spec["down"] = Param("mlp -> embed", (f, d), std=into_stream(model) * f**-0.5)
    if bias in ("mlp", "all"):
        spec |= {f"{name}_bias": Param("mlp", (f,), fill=0.0) for name in inputs}
        spec["down_bias"] = Param("norm", (d,), fill=0.0)
    return spec


def into_stream(model: Decoder) -> float:
    """Factor on the standard deviation of weights that write to the residual stream, so that its
    scale stays the same over all layers (GPT-2)."""
    return (2 * model.num_layers) ** -0.5


def project(w: Tree, h: Array) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k and v [B, T, K, H] of h [B, T, D]."""
    kv = "btd,dkh->btkh"
    projected = dots(h, ("btd,dnh->btnh", w["q"]), (kv, w["k"]), (kv, w["v"]))
    q, k, v = (with_bias(y, w, name) for y, name in zip(projected, "qkv", strict=True))
    return constrain(q, "batch seq heads head_dim"), k, v


def qk_normed(norm: QkNorm, w: Tree, q: Array, k: Array, eps: float) -> tuple[Array, Array]:
    """Queries and keys after their norms, where there are any."""
    if norm == "none":
        return q, k
    dims = 2 if norm == "all" else 1
    return rms_norm(q, w["q_norm"], eps, dims=dims), rms_norm(k, w["k_norm"], eps, dims=dims)


def output(w: Tree, h: Array) -> Array:
    """Output projection of attention: [B, T, D] of h [B, T, N, H]."""
    return with_bias(dot("btnh,nhd->btd", h, w["o"]), w, "o")


def feed_forward(
    kind: Mlp, w: Tree, h: Array, chunk_tokens: int | None = None, norm: OutNorm | None = None,
    sub_norm: OutNorm | None = None,
) -> Array:  # fmt: skip
    """The feed-forward of h [B, T, D], followed by `norm`, `chunk_tokens` of each row at a time if
    set. A chunk has the norm in it, whose gradient reads what a chunk computes anyway. `sub_norm`
    is one before the last projection."""
    if chunk_tokens is None or chunk_tokens >= h.shape[1]:
        return _normed(norm, w, _feed_forward(kind, w, h, sub_norm=sub_norm))
    within, behind = (norm, None) if tensor_ways() == 1 else (None, norm)
    names = {*MLP_WEIGHTS, within.weight} if within else set(MLP_WEIGHTS)
    mine = {name: leaf for name, leaf in w.items() if name in names}
    run = partial(_feed_forward, kind, norm=within, sub_norm=sub_norm)
    by_chunks = KERNELS["mlp by chunks"]
    h = name_result(by_chunks(run, MLP_WEIGHTS, mine, h, chunk_tokens))
    return _normed(behind, w, h)


def _feed_forward(
    kind: Mlp, w: Tree, h: Array, norm: OutNorm | None = None, sub_norm: OutNorm | None = None
) -> Array:
    h, wide = before_products(h), "btd,df->btf"
    gates = ((wide, w["gate"], GATE),) if kind in GATED else ()
    up, *gate = dots(h, (wide, w["up"]), *gates)
    up = constrain(with_bias(up, w, "up"), "batch seq mlp")
    # a relu and the product after it are one function, which may keep signs alone
    fused = kind == "relu" and sub_norm is None
    h, product = up, KERNELS["relu product"] if fused else dot
    if not fused:
        h = gated(kind, with_bias(gate[0], w, "gate"), up) if gate else activate(kind, up)
    h = h if sub_norm is None else sub_norm.apply(h, w[sub_norm.weight])
    h = h if fused else name_result(h, OPERAND)
    return _normed(norm, w, with_bias(product("btf,fd->btd", h, w["down"]), w, "down"))


def _normed(norm: OutNorm | None, w: Tree, h: Array) -> Array:
    if norm is None:
        return h
    return norm.apply(constrain(h, "batch stream embed"), w[norm.weight])


def with_bias(y: Array, w: Tree, name: str) -> Array:
    """y plus the bias of the projection `name`, if it has one."""
    bias: Any = w.get(f"{name}_bias")
    return y if bias is None else FOR_ALL["+"](y, bias)
