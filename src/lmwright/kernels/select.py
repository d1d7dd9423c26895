"""Selects the implementation for each platform. Every kernel equals its `nn/` twin."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from lmwright.config.registry import Registry
from lmwright.core.compute import EARLY, EARLY_GPUS, Compute, Kernels
from lmwright.core.sharding import context_ways
from lmwright.nn import attention, xent

# imported on demand: a step needs those of one platform, and of what its run asks for
KERNELS = Registry(
    "lmwright.kernels",
    {
        "tpu attention": "tpu_attention.causal_attention",
        "tpu long attention": "tpu_long_attention.causal_attention",
        "splash attention": "tpu_splash.splash_attention",
        "attention with sinks": "sink_attention.attend_by",
        "attention in chunks": "chunk_attention.attend_by",
        "attention of intervals": "interval_attention.attend_by",
        "attention both ways": "interval_attention.both_ways_by",
        "attention of blocks": "block_attention.blocks_by",
        "cpu attention of intervals": "cpu_attention.attention",
        "tpu attention of intervals": "tpu_interval_attention.attention",
        "ring of intervals": "interval_ring.attention",
        "all-to-all of intervals": "all_to_all_attention.attention",
        "cpu attention": "cpu_attention.causal_attention",
        "gpu attention": "gpu_attention.causal_attention",
        "gpu kernels": "gpu_blocks.attention",
        "gpu attention taken": "gpu_attention.taken",
        "gpu chunks": "gpu_chunks.attention",
        "gpu attention of intervals": "gpu_attention.attention",
        "attention around a ring": "window_attention.causal_attention",
        "window attention": "window_attention.attend",
        "tpu window attention": "tpu_window_attention.attend",
        "tpu pieces": "tpu_pieces.cut_and_join",
        "all-to-all attention": "all_to_all_attention.causal_attention",
        "cpu cross-entropy": "cpu_xent.chunked_xent",
        "compute for lanes": "cpu_xent.for_lanes",
        "compiler options": "compiler_options.options_for",
        "sums in order": "compiler_options.in_order",
        "disentangled attention": "disentangled_attention.attend_by",
        "mlstm": "mlstm_by.mix_by",
        "tpu mlstm": "tpu_mlstm.mlstm",
        "delta rule": "delta_rule_by.delta_rule",
        "tpu delta rule": "tpu_delta_rule.delta_rule",
        "mlp by chunks": "mlp_chunks.by_chunks",
        "relu product": "relu_signs.relu_dot",
    },
)

LONG_ROW = 2048  # tokens


def kernels_for(platform: str, num_devices: int, device_kind: str = "") -> Kernels:
    """The set of kernels for devices of a platform; those of the CPU are for one device."""
    if platform == "tpu":
        return "early tpu" if device_kind in EARLY else "tpu"
    if platform == "gpu":
        return "early gpu" if any(name in device_kind for name in EARLY_GPUS) else "gpu"
    return "cpu" if platform == "cpu" and num_devices == 1 else "reference"


def compiler_options(compute: Compute, device_kind: str = "") -> dict[str, str]:
    """Compiler options for `jax.jit` that these kernels need."""
    return KERNELS["compiler options"](compute, device_kind)


def causal_attention(compute: Compute) -> Callable[..., Array]:
    """Causal self-attention for this platform; signature of `nn.attention.causal_attention`."""
    if context_ways() == 1:
        return _whole_rows(compute)
    if compute.context_attention == "ring":
        return partial(KERNELS["attention around a ring"], _windows(compute))
    return partial(KERNELS["all-to-all attention"], _whole_rows(compute))


def self_attention(compute: Compute, both_ways: bool) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, scoring)` inside segments, for this platform: causal, or
    `both_ways`, where a window counts on either side."""
    if both_ways:
        return KERNELS["attention both ways"](compute)
    return causal_attention(compute)


def attend(compute: Compute) -> Callable[..., Array]:
    """`attend(q, k, v, seen, scoring, reach)` for this platform, as `nn.intervals.attention` of
    intervals that lie within `reach`, over the mesh that is set."""
    return KERNELS["attention of intervals"](compute)


def attention_of_blocks(compute: Compute, size: int, masked_rows: int) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, scoring)` of block diffusion, for rows that hold so many masked
    copies and then the clean row, in blocks of `size` tokens."""
    return KERNELS["attention of blocks"](compute, size, masked_rows)


def attention_taken(compute: Compute) -> str:
    """Names for people of the kernels of attention in the programs of this process, on platforms
    that choose them by shapes; empty on others."""
    return KERNELS["gpu attention taken"]() if compute.platform == "gpu" else ""


def mlstm(compute: Compute) -> Callable[..., Array]:
    """mLSTM of whole rows; signature of `nn.mlstm.mlstm`."""
    return KERNELS["mlstm"](compute)


def disentangled_attention(compute: Compute) -> Callable[..., Array]:
    """Self-attention with scores of distances; signature of `nn.disentangled.attention`."""
    return KERNELS["disentangled attention"](compute)


def pieces_of_rows(
    model: Any, x: Array, tables: Any, compute: Compute, attend: Callable[..., Array]
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Functions that cut long rows x [B, T, D] as this platform prefers them in a layer with this
    attention, and join them again."""
    if compute.kernels == "tpu" and x.shape[1] > LONG_ROW:
        return KERNELS["tpu pieces"](model, x, tables, compute, attend)
    return unchanged, unchanged


def unchanged(a: Array) -> Array:
    """The array as it is."""
    return a


def _whole_rows(compute: Compute) -> Callable[..., Array]:
    if compute.kernels == "reference":
        return attention.causal_attention
    return attention_of(compute, "attention")


def attention_of(compute: Compute, what: str) -> Callable[..., Array]:
    """The platform's kernel for whole rows, with what of these settings it takes."""
    options = {"early": True} if compute.early else {}
    if compute.platform == "gpu" and compute.one_document:
        options["one_document"] = True
    attend = KERNELS[f"{compute.platform} {what}"]
    return partial(attend, **options) if options else attend


def _windows(compute: Compute) -> Callable[..., Array]:
    if compute.platform == "tpu":
        return partial(KERNELS["tpu window attention"], early=compute.early)
    return KERNELS["window attention"]


def cross_entropy(compute: Compute) -> Callable[..., xent.Xent]:
    """Chunked cross-entropy for this platform; signature of `nn.xent.chunked_xent`."""
    if compute.platform == "cpu":
        return KERNELS["cpu cross-entropy"]
    return xent.chunked_xent


def for_lanes(compute: Compute, num_rows: int, embed_dim: int) -> Compute:
    """Settings of a step that is mapped over lanes with `num_rows` rows in all."""
    if compute.platform != "cpu":
        return compute
    return KERNELS["compute for lanes"](compute, num_rows, embed_dim)
