"""ERNIE 4.5 with experts in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

expert_shared_feed_forward_length    width of the shared experts together
exp_probs_b.bias [E]                 moe_statics.e_score_correction_bias [1, E]
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.ernie4_5 import EVERY, FIRST, LAST, SHARED, dense_layers

NAME = "ernie4_5-moe"
KEYS = {
    "interleave_moe_layer_step": EVERY,
    "leading_dense_block_count": FIRST,
    "expert_shared_count": SHARED,
}
RENAMED = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
BIAS = ".moe_statics.e_score_correction_bias"
WIDTH = "expert_shared_feed_forward_length"


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for plain layers behind others."""
    dense = dense_layers(config[FIRST], config[LAST], config[EVERY], config["num_hidden_layers"])
    if dense != list(range(len(dense))):
        raise UserError(
            f"{where}: llama.cpp's {NAME} has plain layers only at the beginning, and here "
            f"model.dense_layers is {dense}; export to a Hugging Face folder instead"
        )
    return {WIDTH: config[SHARED] * config["moe_intermediate_size"]}


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that the metadata leave out."""
    return {LAST: -1, SHARED: config.get(SHARED, 0)}
