"""DeepSeek and the families with its layers in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.moe import (
    DOTS_KEYS,
    FIRST_DENSE,
    FIRST_OR_LISTED,
    NO_FURTHER,
    SIGMOID_EXPERTS,
    Experts,
    SigmoidHf,
    shared_count,
    shared_dim,
)
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Fixed, Json, refuse_number
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import KEYS

ATTENTION = "model.layers.{i}.self_attn"
LATENTS = {
    "layers.q_a": f"{ATTENTION}.q_a_proj.weight",
    "layers.q_a_norm": f"{ATTENTION}.q_a_layernorm.weight",
    "layers.q_b": f"{ATTENTION}.q_b_proj.weight",
    "layers.kv_a": f"{ATTENTION}.kv_a_proj_with_mqa.weight",
    "layers.kv_a_norm": f"{ATTENTION}.kv_a_layernorm.weight",
    "layers.kv_b": f"{ATTENTION}.kv_b_proj.weight",
}
PLAIN, ROTATED = "qk_nope_head_dim", "qk_rope_head_dim"
LATENT_KEYS = {n: key for n, key in KEYS.items() if n != "head_dim"} | {
    name: name for name in (ROTATED, "v_head_dim", "kv_lora_rank")
}
USUAL: Json = {ROTATED: 64, PLAIN: 128, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
GREEDY, GROUPS = "greedy", "group_limited_greedy"


def _read_head(config: Json, fields: Json, where: str) -> Json:
    refuse_number(PLAIN, config[PLAIN], where, whole=True)
    return {"head_dim": config[PLAIN] + fields["qk_rope_head_dim"]}


def _write_head(model: Any, *_: str) -> Json:
    return {PLAIN: model.head_dim - model.qk_rope_head_dim}


def _read_greedy(config: Json, fields: Json, where: str) -> Json:
    own, method = fields["experts"], config.get("topk_method") or GREEDY
    if method not in (GREEDY, GROUPS):
        raise UserError(
            f"{where}: topk_method {method!r} is not supported; these are: {GREEDY}, {GROUPS}"
        )
    groups: Json = {"best_of_group": 1}
    if method == GREEDY:  # whatever the groups are
        groups = {"num_groups": 1, "groups_per_token": 1}
    return {"experts": own | groups | shared_dim(config, own)}


def _write_greedy(model: Any, architecture: str, _: str) -> Json:
    grouped = model.experts.num_groups > 1
    if grouped and model.experts.best_of_group != 1:
        raise UserError(
            f"model.experts.best_of_group: {model.experts.best_of_group} does not exist in "
            f"{architecture}, only 1; change it to export"
        )
    return {"topk_method": GROUPS if grouped else GREEDY} | shared_count(model, architecture)


HEAD_WIDTH = Derived(_read_head, _write_head)
OF_ALL = (
    *(ACT, HEAD, ROPE, HEAD_WIDTH),
    Fixed("attention_bias", False, same=(None,)),
    Fixed("moe_layer_freq", 1, same=(None,), written=False),
)
PAIRS = Fixed("rope_interleave", True)
SCORES = Fixed("scoring_func", "sigmoid", same=(None,), written=False)
NO_AUX = Fixed("topk_method", "noaux_tc", same=(None,), written=False)


class LatentHf(SigmoidHf):
    """Table of the families whose attention is made of latents."""

    weights = SigmoidHf.weights | LATENTS
    keys = LATENT_KEYS
    optional: ClassVar = {"q_lora_rank": "q_lora_rank"}
    null = (*SigmoidHf.null, "rope_interleave")  # transformers takes it for false


class DeepSeekV2Hf(LatentHf):
    """Both directions of DeepSeek-V2's Hugging Face form."""

    name = "DeepSeek-V2"
    model_types: ClassVar = {"DeepseekV2ForCausalLM": "deepseek_v2"}
    pairs = (
        *(*OF_ALL, FIRST_DENSE),
        Experts(
            DOTS_KEYS,
            {"score": "softmax", "shares": "all", "bias_rate": None, "shared_gate": "none",
             "capacity_factor": None},
            (),
        ),
        Derived(_read_greedy, _write_greedy),
        Fixed("norm_topk_prob", False, same=(None,)),
        Fixed("scoring_func", "softmax", same=(None,), written=False),
        Fixed("mlp_bias", False, same=(None,)),
    )  # fmt: skip
    defaults: ClassVar = {
        **USUAL,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    }  # fmt: skip


class DeepSeekV3Hf(LatentHf):
    """Both directions of DeepSeek-V3's Hugging Face form."""

    name = "DeepSeek-V3"
    model_types: ClassVar = {"DeepseekV3ForCausalLM": "deepseek_v3"}
    null = (*LatentHf.null, "norm_topk_prob")  # transformers takes it for false
    pairs = (*OF_ALL, FIRST_DENSE, *SIGMOID_EXPERTS, PAIRS, SCORES, NO_AUX, NO_FURTHER)
    defaults: ClassVar = {
        **USUAL,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_key_value_heads": 128,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "norm_topk_prob": True,
    }  # fmt: skip


class Glm4MoeLiteHf(LatentHf):
    """Both directions of GLM-4.7-Flash's Hugging Face form."""

    name = "GLM-4.7-Flash"
    model_types: ClassVar = {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}
    pairs = (
        *(*OF_ALL, FIRST_OR_LISTED, *SIGMOID_EXPERTS, PAIRS, SCORES, NO_AUX),
        NO_FURTHER,
    )
    defaults: ClassVar = {
        **USUAL | {"v_head_dim": 256, PLAIN: 192, "q_lora_rank": 768},
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752, "norm_topk_prob": True,
    }  # fmt: skip
