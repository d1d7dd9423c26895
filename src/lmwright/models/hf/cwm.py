"""Code World Model in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, HEAD, Derived, Json, Words
from lmwright.models.hf.rope import ROPE, rope_fields
from lmwright.models.hf.table import Table
from lmwright.models.hf.window import first_global

THETA = 1_000_000.0
USUAL = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Rotations where config.json says none."""


def _read_rope(config: Json, _: Json, where: str) -> Json:
    """Rotations; a theta alone, without anything that scales them, transformers does not read."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = USUAL if rope is None else {"rope_theta": config.get("rope_theta", THETA), **rope}
    rest = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    return rope_fields(rest | {"rope_parameters": rope}, where)


class CwmHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "CWM"
    model_types: ClassVar = {"CwmForCausalLM": "cwm"}
    needs_ids = True
    pairs = (
        ACT,
        HEAD,
        Words("bias", "mlp_bias", {"mlp": True, "none": False}),
        Derived(_read_rope, ROPE.write),
        first_global(8192),
    )
    defaults: ClassVar = {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
