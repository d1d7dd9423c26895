"""Qwen 2 with experts in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.moe import EXPERTS, LISTED_DENSE, SHARES, MoeHf
from lmwright.models.hf.pairs import ACT, HEAD, Fixed, Words
from lmwright.models.hf.qwen3_5 import GATED_EXPERT, experts_beside
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS


class Qwen2MoeHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Qwen 2 MoE"
    model_types: ClassVar = {"Qwen2MoeForCausalLM": "qwen2_moe"}
    weights = WEIGHTS | EXPERTS | GATED_EXPERT
    pairs = (
        *(ACT, HEAD, ROPE, LISTED_DENSE, experts_beside(SHARES)),
        Words("bias", "qkv_bias", {"qkv": True, "none": False}, True, True),
        Fixed("use_sliding_window", False, same=(None,)),
    )
    defaults: ClassVar = {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "intermediate_size": 5632, "shared_expert_intermediate_size": 5632,
        "router_aux_loss_coef": 0.001, "num_key_value_heads": 16, "norm_topk_prob": False,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
    }  # fmt: skip
