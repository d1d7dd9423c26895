"""LFM3 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.gemma import HEAD
from lmwright.models.hf.lfm2 import LAYER, OWN_KEYS, SHARED
from lmwright.models.hf.pairs import NO_IDS, Derived, Fixed, Json
from lmwright.models.hf.rope import SIDES, sides_config, sides_fields
from lmwright.models.hf.table import KEYS, Table
from lmwright.models.hf.window import TYPES, kinds_of, pattern_of, window_said
from lmwright.models.lfm3 import ConvOrReach

ATTENTION = f"{LAYER}.self_attn"
KINDS: dict[ConvOrReach, str] = {
    "conv": "conv",
    "local": TYPES["local"],
    "global": TYPES["global"],
}
WINDOW = 256  # where config.json says none
THETA = 1_000_000.0  # of rotations that say none
ROTATIONS = {
    SIDES[0]: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    SIDES[1]: {"rope_type": "default", "rope_theta": 1e4},
}
"""Rotations where config.json says none."""


def _read_layers(config: Json, fields: Json, where: str) -> Json:
    said, num_layers = config.get("layer_types"), fields["num_layers"]
    if said is None:
        usual: dict[int, ConvOrReach] = {2: "global", 0: "local"}
        said = [KINDS[usual.get(i % 4, "conv") if i else "conv"] for i in range(num_layers)]
    kinds = kinds_of(said, KINDS, num_layers, where)
    reach = [kind for kind in kinds if kind != "conv"]
    window = window_said(config, WINDOW, reach, where)
    return {"mixer_pattern": pattern_of(kinds), "window": window or WINDOW}


def _write_layers(model: Any, *_: str) -> Json:
    return {
        "layer_types": [KINDS[kind] for kind in model.kinds],
        "sliding_window": model.window,
    }


def _read_rope(config: Json, _: Json, where: str) -> Json:
    said = config.get("rope_parameters") or {}
    whole, local = ({"rope_theta": THETA} | (said.get(side) or ROTATIONS[side]) for side in SIDES)
    return sides_fields(config, whole, local, where, joint=True)


class Lfm3Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "LFM3"
    model_types: ClassVar = {"Lfm3ForCausalLM": "lfm3"}
    weights = SHARED | {
        "layers.q_norm": f"{ATTENTION}.q_norm.weight",
        "layers.k_norm": f"{ATTENTION}.k_norm.weight",
        "layers.o": f"{ATTENTION}.o_proj.weight",
        "layers.head_gate": f"{ATTENTION}.gate_proj.weight",
        "layers.attention_out_norm": f"{LAYER}.post_operator_norm.weight",
        "layers.mlp_out_norm": f"{LAYER}.post_ffn_norm.weight",
    }
    modules: ClassVar = {f"{ATTENTION}.gate_proj": f"{ATTENTION}.g_proj"}
    convs = ("layers.conv",)
    keys = KEYS | OWN_KEYS
    pairs = (
        HEAD,
        Derived(_read_rope, lambda model, *_: sides_config(model, (), before=False)),
        Derived(_read_layers, _write_layers),
        Fixed("conv_bias", False, same=(None,)),
        Fixed("attention_bias", False, same=(None,)),
        Fixed("use_sandwich_norm", True),
        Fixed("use_attention_gate", True),
        NO_IDS,
    )
    defaults: ClassVar = {
        "vocab_size": 128_000, "num_key_value_heads": 4, "norm_eps": 1e-5, "conv_L_cache": 7,
        "max_position_embeddings": 128_000, "head_dim": 128,
    }  # fmt: skip
