"""Solar Open in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.moe import NO_PLAIN, SIGMOID_EXPERTS, SigmoidHf
from lmwright.models.hf.pairs import ACT, HEAD, Words, only_written
from lmwright.models.hf.rope import ROPE, usual_theta

THETA = 1_000_000.0  # where config.json says none


class SolarOpenHf(SigmoidHf):
    """Both directions of the family's Hugging Face form."""

    name = "Solar Open"
    model_types: ClassVar = {"SolarOpenForCausalLM": "solar_open"}
    keys = NO_PLAIN
    pairs = (
        *(ACT, HEAD, ROPE, usual_theta(THETA), *SIGMOID_EXPERTS),
        Words("bias", "attention_bias", {"qkv": True, "none": False}),
        only_written(first_k_dense_replace=0),  # as released files say; no layer is plain
    )
    defaults: ClassVar = {
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_routed_experts": 128,
        "n_shared_experts": 1, "moe_intermediate_size": 1280, "num_experts_per_tok": 8,
        "num_key_value_heads": 8, "num_attention_heads": 64, "head_dim": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "norm_topk_prob": True,
    }  # fmt: skip
