"""OLMo 2 and OLMo 3 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.pairs import ACT, BIAS, HEAD, Derived, Json
from lmwright.models.hf.rope import ORIGINAL, ROPE, SIDES, sides_config, sides_fields
from lmwright.models.hf.table import WEIGHTS, Table
from lmwright.models.hf.window import reach_said, window_config, window_fields, window_said

NEWER = "Olmo3ForCausalLM"
THETA = 500_000.0  # where config.json says none


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    if config["architectures"][0] != NEWER:
        return {"window": None}
    reach = reach_said(config, 4, fields["num_layers"], where)
    return window_fields(window_said(config, 4096, reach, where), reach)


def _write_reach(model: Any, architecture: str, _: str) -> Json:
    return window_config(model) if architecture == NEWER else {}


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations from a config.json, where OLMo 3 scales those of global layers alone."""
    if config["architectures"][0] != NEWER:
        return ROPE.read(config, fields, where)
    rope = config.get("rope_parameters") or {}
    usual = config.get("rope_theta") or THETA
    whole, local = ({"rope_theta": usual} | (rope.get(side) or {}) for side in SIDES)
    whole |= config.get("rope_scaling") or {}
    found = sides_fields(config, whole, local, where, joint=True)
    if fields["window"] is None:
        found["local_rope_theta"] = None
    return found


def _write_rope(model: Any, architecture: str, family: str) -> Json:
    if architecture != NEWER:
        return ROPE.write(model, architecture, family)
    config = sides_config(model, (), before=False)
    config.pop(ORIGINAL, None)
    return config


class Olmo2Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "OLMo"
    model_types: ClassVar = {"Olmo2ForCausalLM": "olmo2", NEWER: "olmo3"}
    weights = WEIGHTS | {
        "layers.attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    pairs = (
        ACT,
        HEAD,
        BIAS,
        Derived(_read_reach, _write_reach),
        Derived(_read_rope, _write_rope),
    )

    def architecture(self, model: Any) -> str:
        """OLMo 3 for models with a window."""
        return "Olmo2ForCausalLM" if model.window is None else NEWER
