"""Mellum 2 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.moe import (
    COMMON,
    DENSE,
    SOFTMAX,
    TYPES,
    Experts,
    MoeHf,
    dense_config,
    dense_said,
)
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, Derived, Json
from lmwright.models.hf.rope import SIDES, sides_config, sides_fields
from lmwright.models.hf.window import reach_config, reach_of, window_fields, window_said

WINDOW = 1024  # where config.json says none
THETAS = dict(zip(SIDES, (500_000.0, 10_000.0), strict=True))
"""Of rotations where config.json says none."""


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations by the type of a layer; transformers asks for those alone that layers have."""
    said = config.get("rope_parameters")
    if said is None:
        said = {side: {"rope_theta": theta} for side, theta in THETAS.items()}
    types = config.get("layer_types") or [SIDES[0]]
    needed = [side for side in SIDES if side in types]
    lacking = [side for side in needed if not isinstance(said, dict) or not said.get(side)]
    if lacking:
        raise UserError(
            f"{where}: rope_parameters has no object for {' and '.join(lacking)}, as layer_types "
            "asks for; add it"
        )
    whole, local = (said[side if side in needed else needed[0]] for side in SIDES)
    return sides_fields(config, whole, local, where, joint=True)


def _read_layers(config: Json, fields: Json, where: str) -> Json:
    num_layers = fields["num_layers"]
    types = config.get("layer_types") or [SIDES[0]] * num_layers
    reach = reach_of(types, num_layers, where)
    window = window_said(config, WINDOW, reach, where)
    dense = dense_said(config.get(DENSE) or [TYPES[0]] * num_layers, num_layers, where)
    local = {"layer_pattern": ["global"], **window_fields(window, reach)}
    return local | {"dense_layers": dense}


def _write_layers(model: Any, *_: str) -> Json:
    return reach_config(model) | dense_config(model)


class MellumHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Mellum 2"
    model_types: ClassVar = {"MellumForCausalLM": "mellum"}
    pairs = (
        *(ACT, HEAD, BIAS, Derived(_read_layers, _write_layers)),
        Derived(_read_rope, lambda model, *_: sides_config(model, (), before=False)),
        Experts(COMMON | {"mlp_dim": "moe_intermediate_size"}, SOFTMAX),
    )
    defaults: ClassVar = {
        "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
        "intermediate_size": 7168, "router_aux_loss_coef": 0.001, "num_key_value_heads": 4,
        "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072,
        "norm_topk_prob": True,
    }  # fmt: skip
