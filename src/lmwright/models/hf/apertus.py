"""Apertus in Hugging Face."""

from typing import ClassVar

from lmwright.models.apertus import XIELU
from lmwright.models.hf.pairs import BIAS, HEAD, Derived, Fixed, Json
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Table

LAYER = "model.layers.{i}"
THETA = 12_000_000.0
USUAL_ROPE = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""What transformers takes where config.json has no rope_parameters."""
FIXED_KEYS = {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    said = config.get("rope_scaling") or config.get("rope_parameters")
    theta = config.get("rope_theta") or THETA
    rope = {"rope_parameters": said or USUAL_ROPE, "rope_theta": theta}
    return ROPE.read(config | rope, fields, where)


class ApertusHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Apertus"
    model_types: ClassVar = {"ApertusForCausalLM": "apertus"}
    weights = WEIGHTS | {
        "layers.attention_norm": f"{LAYER}.attention_layernorm.weight",
        "layers.mlp_norm": f"{LAYER}.feedforward_layernorm.weight",
        **{f"layers.{name}": f"{LAYER}.mlp.act_fn.{name.removeprefix('xielu_')}" for name in XIELU},
    }
    pairs = (
        *(Fixed(key, value) for key, value in FIXED_KEYS.items()),
        *(HEAD, BIAS, Derived(_read_rope, ROPE.write)),
    )
    defaults: ClassVar = {"max_position_embeddings": 65_536, "rms_norm_eps": 1e-5}
