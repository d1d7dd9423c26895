"""GLM-4 in Hugging Face: with the norms behind the branches, and without, as before 0414."""

from typing import Any, ClassVar

from lmwright.models.hf.pairs import ACT, HEAD, Derived, Json, Words
from lmwright.models.hf.rope import PARTIAL_ROPE
from lmwright.models.hf.table import WEIGHTS, Table

NORMED, PLAIN = "Glm4ForCausalLM", "GlmForCausalLM"
PAD_ID = 151_329  # of padding, where config.json names none


def _read_norms(config: Json, *_: Any) -> Json:
    return {"out_norms": "branches" if config["architectures"][0] == NORMED else "none"}


class Glm4Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "GLM-4"
    model_types: ClassVar = {NORMED: "glm4", PLAIN: "glm"}
    weights = WEIGHTS | {
        "layers.gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
        "layers.attention_out_norm": "model.layers.{i}.post_self_attn_layernorm.weight",
        "layers.mlp_out_norm": "model.layers.{i}.post_mlp_layernorm.weight",
    }
    pairs = (
        ACT,
        HEAD,
        Derived(_read_norms),  # which the architecture says
        Words("bias", "attention_bias", {"qkv": True, "none": False}, True, True),
        PARTIAL_ROPE,
        Derived(write=lambda m, *_: {"pad_token_id": None} if m.vocab_size <= PAD_ID else {}),
    )
    defaults: ClassVar = {
        "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131_072,
    }  # fmt: skip

    def architecture(self, model: Any) -> str:
        """Name of the architecture: that with norms behind the branches where the model has
        some."""
        return NORMED if model.out_norms == "branches" else PLAIN
