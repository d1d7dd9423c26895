"""AFMoE in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.moe import (
    BLOCK,
    COMMON,
    EXPERTS,
    SHARED_EXPERTS,
    SIGMOID,
    Experts,
    MoeHf,
    biased,
    first_dense,
)
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, Derived, Fixed, Json, Words
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS
from lmwright.models.hf.window import (
    always_window,
    pattern_of,
    reach_config,
    reach_said,
    refuse_period,
)

LAYER = "model.layers.{i}"
EVERY, SHARED, DENSE = "global_attn_every_n_layers", "num_shared_experts", "num_dense_layers"
WINDOW = 1024  # where config.json says none
KEYS = {n: key for n, key in COMMON.items() if n != "balance_loss"} | {
    "mlp_dim": "moe_intermediate_size", "scale": "route_scale",
}  # fmt: skip
RELEASED_KEYS = {
    "route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1,
    "num_expert_groups": 1, "num_limited_groups": 1,
}  # fmt: skip
"""What released files say and transformers does not read."""


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    if config.get("layer_types") is None:
        refuse_period(EVERY, config[EVERY], where)
    reach = reach_said(config, config[EVERY], fields["num_layers"], where)
    return {"window": always_window(config, WINDOW, where), "layer_pattern": pattern_of(reach)}


class AfmoeHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "AFMoE"
    model_types: ClassVar = {"AfmoeForCausalLM": "afmoe"}
    weights = WEIGHTS | EXPERTS | SHARED_EXPERTS | {
        "layers.router": f"{BLOCK}.router.gate.weight",
        "layers.router_bias": f"{BLOCK}.expert_bias",
        "layers.attention_gate": f"{LAYER}.self_attn.gate_proj.weight",
        "layers.attention_out_norm": f"{LAYER}.post_attention_layernorm.weight",
        "layers.mlp_norm": f"{LAYER}.pre_mlp_layernorm.weight",
        "layers.mlp_out_norm": f"{LAYER}.post_mlp_layernorm.weight",
    }  # fmt: skip
    null = (*MoeHf.null, EVERY)
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, first_dense(DENSE)),
        Derived(_read_reach, lambda model, *_: reach_config(model)),
        Experts(KEYS, SIGMOID | {"shares": "chosen", "num_groups": 1}, ()),
        biased(SHARED),
        Words("embedding_scale", "mup_enabled", {"root": True, "none": False}),
        *(Fixed(key, value, same=(None,), written=False) for key, value in RELEASED_KEYS.items()),
    )  # fmt: skip
    defaults: ClassVar = {
        "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, SHARED: 2,
        "intermediate_size": 6144, "route_scale": 1.0, DENSE: 1, EVERY: 4, "head_dim": 128,
        "num_attention_heads": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 16_384,
    }  # fmt: skip
