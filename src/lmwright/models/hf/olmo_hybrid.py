"""OLMo Hybrid in Hugging Face, with the names of the released files."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import BIAS, HEAD, NO_IDS, Derived, Fixed, Json, Words
from lmwright.models.hf.qwen3_5 import TYPES
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import KEYS, WEIGHTS, Fused, Table
from lmwright.models.hf.window import kinds_said, pattern_of

LAYER = "model.layers.{i}."
LINEAR = f"{LAYER}linear_attn."
PARTS = {
    "linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "output_gate": "g_proj",
    "write_gate": "b_proj", "decay_gate": "a_proj", "out": "o_proj", "memory_norm": "o_norm",
    "q_conv": "q_conv1d", "k_conv": "k_conv1d", "v_conv": "v_conv1d",
}  # fmt: skip
RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
"""Pieces of names in files that transformers writes, and in released ones."""


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    kinds = kinds_said(config, TYPES, 4, fields["num_layers"], where)
    if config.get("layer_types") is None and "full" not in kinds:
        kinds[-1] = "full"
    return {"mixer_pattern": pattern_of(kinds)}


def _write_pattern(model: Any, _: str, family: str) -> Json:
    if missing := [kind for kind in TYPES if kind not in model.kinds]:
        raise UserError(
            f"model.mixer_pattern: has no {missing[0]} layer, and Hugging Face's {family} has some "
            "of both kinds; add one"
        )
    return {"layer_types": [TYPES[kind] for kind in model.kinds]}


def _read_memory(config: Json, fields: Json, where: str) -> Json:
    """Heads and widths of the memories, which follow from those of attention where they are not
    said."""
    heads = {side: config.get(f"linear_num_{side}_heads") or fields["num_heads"]
             for side in ("key", "value")}  # fmt: skip
    key = config.get("linear_key_head_dim")
    key = int(0.75 * fields["embed_dim"] / heads["key"]) if key is None else key
    value = config.get("linear_value_head_dim")
    return {
        "linear_num_key_heads": heads["key"], "linear_num_value_heads": heads["value"],
        "linear_key_dim": key, "linear_value_dim": 2 * key if value is None else value,
    }  # fmt: skip


def _write_memory(model: Any, *_: str) -> Json:
    return {
        "linear_num_key_heads": model.linear_num_key_heads,
        "linear_num_value_heads": model.linear_num_value_heads,
        "linear_key_head_dim": model.linear_key_dim,
        "linear_value_head_dim": model.linear_value_dim,
    }


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations, of which there are none where theta is null."""
    said = config.get("rope_parameters")
    held = said if isinstance(said, dict) and "rope_theta" in said else config
    if held.get("rope_theta", 0) is None:
        return {"rotation": "nope"}
    return {"rotation": "rope"} | ROPE.read(config, fields, where)


def _write_rope(model: Any, architecture: str, family: str) -> Json:
    config: Json = ROPE.write(model, architecture, family)
    if model.rotation == "nope":
        config |= {"rope_theta": None, "rope_parameters": {"rope_theta": None}}
    return config


class OlmoHybridHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "OLMo Hybrid"
    model_types: ClassVar = {"OlmoHybridForCausalLM": "olmo_hybrid"}
    weights = WEIGHTS | {
        "layers.attention_out_norm": f"{LAYER}post_attention_layernorm.weight",
        "layers.mlp_out_norm": f"{LAYER}post_feedforward_layernorm.weight",
        "layers.a_log": f"{LINEAR}A_log",
        "layers.dt_bias": f"{LINEAR}dt_bias",
        **{f"layers.{ours}": f"{LINEAR}{theirs}.weight" for ours, theirs in PARTS.items()},
    }
    convs = tuple(f"layers.{name}_conv" for name in "qkv")
    keys = KEYS | {"conv_tokens": "linear_conv_kernel_dim"}
    pairs = (
        HEAD, BIAS, NO_IDS,
        Derived(_read_rope, _write_rope),
        Derived(_read_pattern, _write_pattern),
        Derived(_read_memory, _write_memory),
        Words("write_limit", "linear_allow_neg_eigval", {"two": True, "one": False}, True),
        Fixed("hidden_act", "silu", same=(None,)),
    )  # fmt: skip
    defaults: ClassVar = {
        "vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 30, "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
    }  # fmt: skip

    def recut(self, config: Json, where: str) -> tuple[Fused, Mapping[str, str]]:
        """The filters of a layer, which transformers' class has as one and its own files in three
        parts of one size."""
        fields = self.fields(config, where)
        keys = fields["linear_num_key_heads"] * fields["linear_key_dim"]
        values = fields["linear_num_value_heads"] * fields["linear_value_dim"]
        sizes = zip("qkv", (keys, keys, values), strict=True)
        parts = tuple((f"linear_attn.{name}_conv1d.weight", rows) for name, rows in sizes)
        return {"linear_attn.conv1d.weight": parts}, RENAMED
