"""Nemotron-H in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

attention.head_count_kv     of each layer, 0 where it has no attention
feed_forward_length         of each layer, 0 where it is no mlp; where both are 0, it is Mamba-2
mixer.A_log, D, norm, ...   as Granite 4's (`gguf_mamba`)
"""

from collections.abc import Mapping
from typing import Any

from lmwright.formats.gguf_lfm2 import HEADS
from lmwright.models.hf.nemotron_h import NO_LEAST_STEP, TYPES

NAME = "nemotron_h"
WIDTHS, INNER = "feed_forward_length", "ssm.inner_size"
KEYS = {
    "attention.layer_norm_epsilon": "layer_norm_epsilon",  # beside the usual one for the same
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
FIXED = {"mlp_hidden_act": "relu2"} | NO_LEAST_STEP


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys below the architecture's name that are lists, or follow from several of config.json."""
    types, heads, width = (
        config[key] for key in ("layers_block_type", "num_key_value_heads", "intermediate_size")
    )
    return {
        HEADS: [heads if kind == TYPES["full"] else 0 for kind in types],
        WIDTHS: [width if kind == TYPES["mlp"] else 0 for kind in types],
        INNER: config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as other architectures have them: heads and width of the layers that have some,
    where these are equal."""
    found = dict(meta)
    for key in (f"{NAME}.{HEADS}", f"{NAME}.{WIDTHS}"):
        if isinstance(each := meta.get(key), list):
            own = sorted({*each} - {0})
            found[key] = own[0] if len(own) == 1 else own or None
    return found


def config_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that other architectures do not have."""
    heads, widths = meta.get(f"{NAME}.{HEADS}"), meta.get(f"{NAME}.{WIDTHS}")
    inner, number = meta.get(f"{NAME}.{INNER}"), meta.get(f"{NAME}.ssm.time_step_rank")
    config: dict[str, Any] = {"mamba_head_dim": inner // number} if inner and number else {}
    if isinstance(heads, list) and isinstance(widths, list):
        kinds = [
            "mlp" if width else "full" if head else "mamba"
            for head, width in zip(heads, widths, strict=False)
        ]
        config["layers_block_type"] = [TYPES[kind] for kind in kinds]
    return config
