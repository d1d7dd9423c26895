"""Gemma in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import GATED_ACT, Derived, Fixed, Json, Words
from lmwright.models.hf.rope import ORIGINAL, ROPE, SIDES, sides_config, sides_fields
from lmwright.models.hf.table import WEIGHTS, Table
from lmwright.models.hf.window import reach_said, window_config, window_fields, window_said

NEWER, VAULT = "Gemma3ForCausalLM", "VaultGemmaForCausalLM"
WINDOW = 4096  # where config.json says none
THETAS = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
"""Keys for the thetas of global and of local layers in the form before, and the usual ones."""
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # the same
GELU = "gelu_pytorch_tanh"
ACT = Words("mlp", "hidden_activation", GATED_ACT, GELU, GELU)
HEAD = Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True)
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    """Gemma 2 and VaultGemma have every second layer global, Gemma 3 every
    `sliding_window_pattern`-th."""
    num_layers, every = fields["num_layers"], 2
    if config["architectures"][0] == NEWER:
        every = config.get("sliding_window_pattern", 6)
    reach = reach_said(config, every, num_layers, where)
    window = window_said(config, WINDOW, reach, where)
    local = {
        "window": window or WINDOW,
        "layer_pattern": ["global"],
    }  # where no layer is, a pattern says it
    return local | {k: v for k, v in window_fields(window, reach).items() if v is not None}


def _read_scale(config: Json, fields: Json, where: str) -> Json:
    scale = _given(config, "query_pre_attn_scalar", 256)
    return {"query_dim": None if scale == fields["head_dim"] else scale}


def _given(config: Json, key: str, usual: int) -> Any:
    """The value of a key for which null says nothing."""
    return usual if config.get(key) is None else config[key]


def _read_norms(config: Json, _: Json, where: str) -> Json:
    newer = config["architectures"][0] == NEWER
    if newer and config.get("attn_logit_softcapping"):
        raise UserError(
            f"{where}: attn_logit_softcapping is set, which transformers silently ignores in "
            "Gemma 3; set it to null"
        )
    vault = config["architectures"][0] == VAULT
    return {"qk_norm": "head" if newer else "none", "out_norms": "none" if vault else "branches"}


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations from a config.json, where Gemma 3 has one for each reach of a layer."""
    if config["architectures"][0] != NEWER:
        return ROPE.read(config, fields, where)
    rope = config.get("rope_parameters") or {}
    whole, local = (dict(rope.get(side) or {}) for side in SIDES)
    for rotation, (name, usual) in zip((whole, local), THETAS.items(), strict=True):
        rotation.setdefault("rope_theta", config.get(name, usual))
    whole |= config.get("rope_scaling") or {}
    for rotation, name in zip((whole, local), THETAS, strict=True):
        if rotation["rope_theta"] is None:  # transformers computes nothing with it
            raise UserError(f"{where}: {name} is null; set it, or remove it for Gemma 3's own")
    return sides_fields(config, whole, local, where, joint=True)


def _write_rope(model: Any, architecture: str, family: str) -> Json:
    if architecture != NEWER:
        return ROPE.write(model, architecture, family)
    # the form before can say no other rotation of local layers than a theta of their own
    config = sides_config(model, THETAS, before=model.local_rope_theta is not None)
    config.pop(ORIGINAL, None)
    return config


NOT_SUPPORTED = "{key} is not supported"


class GemmaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Gemma"
    model_types: ClassVar = {
        "Gemma2ForCausalLM": "gemma2", NEWER: "gemma3_text", VAULT: "vaultgemma",
    }  # fmt: skip
    weights = WEIGHTS | {
        f"layers.{ours}": f"model.layers.{{i}}.{theirs}.weight" for ours, theirs in NORMS.items()
    }
    optional: ClassVar = {
        "attention_soft_cap": "attn_logit_softcapping",
        "logits_soft_cap": "final_logit_softcapping",
    }
    pairs = (
        ACT,
        HEAD,
        Derived(_read_rope, _write_rope),
        Fixed("attention_bias", False, NOT_SUPPORTED, same=(None,)),
        Fixed("use_bidirectional_attention", False, NOT_SUPPORTED, same=(None,), written=False),
        Derived(_read_norms),
        Derived(_read_reach, lambda model, *_: window_config(model)),
        Derived(_read_scale, lambda m, *_: {"query_pre_attn_scalar": m.query_dim or m.head_dim}),
    )
    defaults: ClassVar = {"head_dim": 256, "rms_norm_eps": 1e-6, "num_key_value_heads": None}
    own_defaults: ClassVar = {
        "Gemma2ForCausalLM": CAPS,
        VAULT: CAPS,
        NEWER: {
            "vocab_size": 262_208, "max_position_embeddings": 131_072,
            "num_attention_heads": 8, "num_key_value_heads": 4,
        },
    }  # fmt: skip

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        newer = model.qk_norm == "head"
        if model.local_rope_theta is not None and not newer:
            raise UserError(
                "model.local_rope_theta: Gemma 2 and VaultGemma have one theta; unset it, or set "
                'qk_norm = "head" for a Gemma 3'
            )
        if model.attention_soft_cap is not None and newer:
            raise UserError("model.attention_soft_cap: transformers' Gemma 3 has none; unset it")
        if newer and model.out_norms == "none":
            raise UserError(
                "model.out_norms: Gemma 3 has norms behind attention and mlp; set it to "
                '"branches", or qk_norm = "none" for a VaultGemma'
            )
        if model.out_norms == "none":
            return VAULT
        return NEWER if newer else "Gemma2ForCausalLM"
