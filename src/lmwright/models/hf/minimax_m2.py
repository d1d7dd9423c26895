"""MiniMax-M2 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.moe import (
    NEW_BIAS_RATE,
    NO_PLAIN,
    NUMBERED_EXPERTS,
    SPARSE,
    Experts,
    MoeHf,
    refuse_unbiased,
)
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Fixed, Json, only_written, refuse_number
from lmwright.models.hf.rope import PARTIAL_ROPE, usual_theta
from lmwright.models.hf.table import WEIGHTS

KEYS = {
    "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
    "mlp_dim": "intermediate_size",
}  # fmt: skip
SIGMOID_OF_ALL = {
    "score": "sigmoid", "scale": 1.0, "num_groups": 1, "shared_dim": None, "capacity_factor": None,
    "shares": "chosen",
}  # fmt: skip
RELEASED_KEYS = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
}  # fmt: skip
"""What released files say and transformers does not read."""
NO_MODULES = only_written(num_mtp_modules=0, use_mtp=False)


def _read_experts(config: Json, fields: Json, where: str) -> Json:
    if 0 in (config.get("attn_type_list") or ()):
        raise UserError(
            f"{where}: attn_type_list has layers of linear attention, which are not computed"
        )
    return {"experts": fields["experts"] | {"bias_rate": NEW_BIAS_RATE}}


def _write_experts(model: Any, *names: str) -> Json:
    return refuse_unbiased(model, *names) | {"num_local_experts": model.experts.num_experts}


def _read_rotated(config: Json, fields: Json, where: str) -> Json:
    """Rotations, whose part of each head released files say as a number of dims."""
    dims, told = config.get("rotary_dim"), "partial_rotary_factor"
    if dims is not None and told not in config:
        refuse_number("rotary_dim", dims, where, whole=True)
        config = config | {told: dims / fields["head_dim"]}
    return PARTIAL_ROPE.read(config, fields, where)


def _write_rotated(model: Any, *names: str) -> Json:
    return PARTIAL_ROPE.write(model, *names) | {"rotary_dim": model.rotary_dim}


class MinimaxM2Hf(MoeHf):
    """Both directions of MiniMax-M2's Hugging Face form."""

    name = "MiniMax-M2"
    model_types: ClassVar = {"MiniMaxM2ForCausalLM": "minimax_m2"}
    weights = WEIGHTS | NUMBERED_EXPERTS | {
        "layers.router_bias": f"{SPARSE}.e_score_correction_bias",
    }  # fmt: skip
    keys = NO_PLAIN
    pairs = (
        *(ACT, HEAD, Derived(_read_rotated, _write_rotated), usual_theta(5_000_000.0)),
        Experts(KEYS, SIGMOID_OF_ALL, ()),
        Derived(_read_experts, _write_experts),
        *(Fixed(key, value) for key, value in RELEASED_KEYS.items()),
        NO_MODULES,
    )
    defaults: ClassVar = {
        "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536,
        "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 196_608,
    }  # fmt: skip
