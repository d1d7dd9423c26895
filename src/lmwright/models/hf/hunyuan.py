"""Hunyuan's dense models in Hugging Face."""

from typing import ClassVar

import numpy as np

from lmwright.models.hf.pairs import ACT, BIAS, HEAD, Derived, Json, refuse_number
from lmwright.models.hf.rope import ROPE, first_given, rope_fields
from lmwright.models.hf.table import WEIGHTS, Table


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations from a config.json, where "dynamic" with `alpha` is a larger theta in rows of any
    length."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    said = rope if isinstance(rope, dict) else {}
    kind, alpha = said.get("rope_type") or said.get("type"), said.get("alpha")
    if kind != "dynamic" or not alpha:
        return ROPE.read(config, fields, where)
    refuse_number("rope_scaling.alpha", alpha, where)
    theta = first_given(rope.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    refuse_number("rope_theta", theta, where)
    width = fields["head_dim"]
    theta *= alpha ** (width / (width - 2))
    # as the float32 that is computed with, and that a GGUF file holds
    return rope_fields({"rope_theta": float(str(np.float32(theta)))}, where)


BEHIND = {
    "layers.q_norm": "model.layers.{i}.self_attn.query_layernorm.weight",
    "layers.k_norm": "model.layers.{i}.self_attn.key_layernorm.weight",
}
"""Norms behind the rotation."""
ALPHA_ROPE = Derived(_read_rope, ROPE.write)


class HunyuanHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Hunyuan"
    model_types: ClassVar = {"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"}
    weights = WEIGHTS | BEHIND
    pairs = (ACT, HEAD, BIAS, ALPHA_ROPE)
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
