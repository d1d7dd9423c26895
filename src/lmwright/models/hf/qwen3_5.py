"""Qwen3.5 in Hugging Face: the text model."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.table import KEYS, WEIGHTS, Table
from lmwright.models.hf.window import pattern_of

LINEAR = "model.layers.{i}.linear_attn."
TYPES = {"linear": "linear_attention", "full": "full_attention"}
SIZES = ("linear_key_head_dim", "linear_value_head_dim")
REFUSAL = "{key} = {said} is not supported; it is {value} in released models"


def _read_size(config: Json, _: Json, where: str) -> Json:
    keys, values = (config[name] for name in SIZES)
    if keys != values:
        raise UserError(
            f"{where}: {SIZES[0]} = {keys} and {SIZES[1]} = {values} differ, which is not "
            "supported; in released models they are equal"
        )
    return {"linear_head_dim": keys}


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    num_layers, types = fields["num_layers"], config.get("layer_types")
    if types is None:
        every = config.get("full_attention_interval", 4)
        types = [TYPES["linear" if (i + 1) % every else "full"] for i in range(num_layers)]
    names = {theirs: ours for ours, theirs in TYPES.items()}
    if not isinstance(types, list) or len(types) != num_layers or set(types) - names.keys():
        raise UserError(
            f"{where}: layer_types does not name {' or '.join(names)} for each of {num_layers} "
            "layers; take config.json from the source again"
        )
    return {"mixer_pattern": pattern_of([names[each] for each in types])}


def _write_pattern(model: Any, *_: str) -> Json:
    return {"layer_types": [TYPES[kind] for kind in model.kinds]}


def _write_rope(model: Any, *_: str) -> Json:
    return rope_config(model.rope_theta, model.rope_scaling, model.seq_len, model.rotary_fraction)


class Qwen35Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Qwen3.5"
    model_types: ClassVar = {"Qwen3_5ForCausalLM": "qwen3_5_text"}
    weights = WEIGHTS | {
        "layers.qkv": f"{LINEAR}in_proj_qkv.weight",
        "layers.conv": f"{LINEAR}conv1d.weight",
        "layers.output_gate": f"{LINEAR}in_proj_z.weight",
        "layers.write_gate": f"{LINEAR}in_proj_b.weight",
        "layers.decay_gate": f"{LINEAR}in_proj_a.weight",
        "layers.a_log": f"{LINEAR}A_log",
        "layers.dt_bias": f"{LINEAR}dt_bias",
        "layers.memory_norm": f"{LINEAR}norm.weight",
        "layers.out": f"{LINEAR}out_proj.weight",
    }
    convs = ("layers.conv",)
    keys = KEYS | {
        "linear_num_key_heads": "linear_num_key_heads",
        "linear_num_value_heads": "linear_num_value_heads",
        "conv_tokens": "linear_conv_kernel_dim",
    }
    pairs = (
        HEAD,
        Derived(lambda config, _, where: rope_fields(config, where, partial=True), _write_rope),
        Derived(_read_size, lambda model, *_: dict.fromkeys(SIZES, model.linear_head_dim)),
        Derived(_read_pattern, _write_pattern),
        Fixed("hidden_act", "silu", REFUSAL),
        Fixed("attention_bias", False, REFUSAL, same=(None,)),
        NO_IDS,
    )
    defaults: ClassVar = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
        "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        **dict.fromkeys(SIZES, 128),
    }  # fmt: skip
