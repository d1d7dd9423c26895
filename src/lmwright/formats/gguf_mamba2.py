"""Mamba-2 in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

attention.head_count, feed_forward_length   0, which llama.cpp asks for
ssm.inner_size, ssm.time_step_rank          width of all heads, and their number
mixer.A_log, D, norm, ...                   as Granite 4's (`gguf_mamba`)
"""

from collections.abc import Mapping
from typing import Any

NAME = "mamba2"
INNER = "ssm.inner_size"
KEYS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "num_heads",
}
RENAMED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "head_dim": "",  # of attention; a Mamba-2 has another by this name
}
NONE = {"attention.head_count": 0, "feed_forward_length": 0}


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name."""
    return NONE | {INNER: config["num_heads"] * config["head_dim"]}


def config_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that other architectures do not have, or otherwise."""
    said = (meta.get(f"{NAME}.{key}") for key in (INNER, "ssm.time_step_rank", "embedding_length"))
    inner, heads, width = said
    if not (inner and heads and width):
        return {"head_dim": None}
    return {"head_dim": inner // heads, "expand": inner // width}
