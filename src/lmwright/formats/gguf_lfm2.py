"""LFM2 in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

attention.head_count_kv     of each layer, 0 where a convolution is in the place of attention
shortconv.conv [D, K]       conv.conv.weight [D, 1, K]
exp_probs_b.bias            feed_forward.expert_bias
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_deepseek import GATING, SIGMOID
from lmwright.models.hf.lfm2 import TYPES

KEYS = {"shortconv.l_cache": "conv_L_cache"}
MOE_KEYS = KEYS | {"leading_dense_block_count": "num_dense_layers"}
FIXED = {"conv_bias": False}
# llama.cpp norms the weights of experts, does not scale them, and needs a bias
MOE_FIXED = FIXED | {
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True,
}  # fmt: skip
HEADS = "attention.head_count_kv"


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for a model whose layers are all of one
    kind, for which llama.cpp has no memory."""
    heads, full = config["num_key_value_heads"], TYPES["full"]
    if len(set(config["layer_types"])) == 1:
        raise UserError(
            f"{where}: llama.cpp's LFM2 has both convolutions and attention, and here all layers "
            "are alike (model.mixer_pattern); export to a Hugging Face folder instead"
        )
    meta = {HEADS: [heads if kind == full else 0 for kind in config["layer_types"]]}
    return meta | ({GATING: SIGMOID} if "num_experts" in config else {})


def plain(meta: Mapping[str, Any], name: str, *more: str) -> dict[str, Any]:
    """The metadata as other architectures have them: heads, and what `more` names, of the layers
    that have some, where these are equal."""
    found = dict(meta)
    for key in (f"{name}.{each}" for each in (HEADS, *more)):
        if isinstance(said := meta.get(key), list):
            own = sorted({*said} - {0})
            found[key] = own[0] if len(own) == 1 else own or None
    return found


def config_of(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of config.json that other architectures do not have."""
    heads, own = meta.get(f"{name}.{HEADS}"), {"block_auto_adjust_ff_dim": False}
    if not isinstance(heads, list):
        return own
    return own | {"layer_types": [TYPES["full" if each else "conv"] for each in heads]}
