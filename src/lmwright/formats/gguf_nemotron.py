"""Nemotron-H in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

attention.head_count_kv     of each layer, 0 where it has no attention
feed_forward_length         of each layer, 0 where it is no mlp; where both are 0, it is Mamba-2
mixer.A_log, D, norm, ...   as Granite 4's (`gguf_mamba`)

Where a model has experts, each layer that is no mixer has some, and feed_forward_length is theirs.
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_lfm2 import HEADS
from lmwright.models.hf.nemotron_h import NO_LEAST_STEP, TYPES

NAME, MOE = NAMES = "nemotron_h", "nemotron_h_moe"
EXPERTS = "n_routed_experts"
WIDTHS, INNER = "feed_forward_length", "ssm.inner_size"
KEYS = {
    "attention.layer_norm_epsilon": "layer_norm_epsilon",  # beside the usual one for the same
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
MOE_KEYS = KEYS | {
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "moe_latent_size": "moe_latent_size",
}
FIXED = {"mlp_hidden_act": "relu2"} | NO_LEAST_STEP
MOE_FIXED = FIXED | {"n_group": 1, "topk_group": 1}
RENAMED = {"rms_norm_eps": "layer_norm_epsilon"}


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name that are lists, or follow from several of config.json.
    Raises UserError for mlps beside experts, which llama.cpp would take for some."""
    types, heads = config["layers_block_type"], config["num_key_value_heads"]
    wide, width = TYPES["mlp"], config["intermediate_size"]
    if EXPERTS in config:
        if wide in types:
            raise UserError(
                f"{where}: model.mixer_pattern: llama.cpp has no mlps beside experts; export to a "
                "Hugging Face folder instead"
            )
        wide, width = TYPES["moe"], config["moe_intermediate_size"]
    return {
        HEADS: [heads if kind == TYPES["full"] else 0 for kind in types],
        WIDTHS: [width if kind == wide else 0 for kind in types],
        INNER: config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def config_of(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of config.json that other architectures do not have."""
    heads, widths = meta.get(f"{name}.{HEADS}"), meta.get(f"{name}.{WIDTHS}")
    inner, number = meta.get(f"{name}.{INNER}"), meta.get(f"{name}.ssm.time_step_rank")
    config: dict[str, Any] = {"mamba_head_dim": inner // number} if inner and number else {}
    wide = "mlp" if name == NAME else "moe"
    config["norm_topk_prob"] = meta.get(f"{name}.expert_weights_norm", False)  # llama.cpp's own
    if isinstance(heads, list) and isinstance(widths, list):
        kinds = [
            wide if width else "full" if head else "mamba"
            for head, width in zip(heads, widths, strict=False)
        ]
        config["layers_block_type"] = [TYPES[kind] for kind in kinds]
    return config


def place_of(name: str) -> str:
    """The name of an expert's tensor that the gguf package's table knows."""
    if ".mixer.experts." not in name:
        return name
    return name.replace("backbone.", "model.").replace(".mixer.experts.", ".mlp.experts.")
