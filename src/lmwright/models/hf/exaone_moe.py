"""K-EXAONE in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.exaone4 import USUAL
from lmwright.models.hf.moe import (
    BLOCK,
    DOTS_KEYS,
    FIRST_OR_LISTED,
    NO_FURTHER,
    SIGMOID,
    Experts,
    SigmoidHf,
    biased,
)
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Fixed, Json
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.window import (
    EVERY,
    always_window,
    pattern_of,
    reach_config,
    reach_of_every,
)

SHARED = "num_shared_experts"


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    reach = reach_of_every(config, fields["num_layers"], where)
    return {"window": always_window(config, USUAL, where), "layer_pattern": pattern_of(reach)}


class ExaoneMoeHf(SigmoidHf):
    """Both directions of the family's Hugging Face form."""

    name = "K-EXAONE"
    model_types: ClassVar = {"ExaoneMoeForCausalLM": "exaone_moe"}
    weights = SigmoidHf.weights | {"layers.router_bias": f"{BLOCK}.e_score_correction_bias"}
    null = (*SigmoidHf.null, EVERY)
    pairs = (
        *(ACT, HEAD, ROPE, FIRST_OR_LISTED, NO_FURTHER),
        Derived(_read_reach, lambda model, *_: reach_config(model)),
        Experts(DOTS_KEYS | {"num_experts": "num_experts"}, SIGMOID),
        biased(SHARED),
        *(Fixed(key, value, same=(None,), written=False) for key, value in (
            ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))),
    )  # fmt: skip
    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "num_experts": 64,
        SHARED: 1, "moe_intermediate_size": 1024, "intermediate_size": 16_384,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_key_value_heads": 32,
        "num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "norm_topk_prob": True,
    }  # fmt: skip
