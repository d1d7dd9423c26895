"""Qwen3.5 in Hugging Face: the text model."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.delta_net import Mixer
from lmwright.models.hf.moe import (
    BLOCK,
    COMMON,
    EXPERTS,
    NO_PLAIN,
    SOFTMAX,
    Experts,
    stacked_experts,
)
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair, Words
from lmwright.models.hf.rope import rope_fields, write_partial_rope
from lmwright.models.hf.table import KEYS, WEIGHTS, Fused, Table
from lmwright.models.hf.window import kinds_said, pattern_of

LINEAR = "model.layers.{i}.linear_attn."
INPUTS = {
    f"layers.{ours}": f"{LINEAR}in_proj_{theirs}.weight"
    for ours, theirs in {
        "qkv": "qkv", "output_gate": "z", "write_gate": "b", "decay_gate": "a",
    }.items()
}  # fmt: skip
"""Products of what a linear layer reads."""
TYPES: dict[Mixer, str] = {"linear": "linear_attention", "full": "full_attention"}
SIZES = ("linear_key_head_dim", "linear_value_head_dim")


def _read_size(config: Json, _: Json, where: str) -> Json:
    keys, values = (config[name] for name in SIZES)
    if keys != values:
        raise UserError(
            f"{where}: {SIZES[0]} = {keys} and {SIZES[1]} = {values} differ, which is not "
            "supported; in released models they are equal"
        )
    return {"linear_head_dim": keys}


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    every = config.get("full_attention_interval") or 4
    return {
        "mixer_pattern": pattern_of(kinds_said(config, TYPES, every, fields["num_layers"], where))
    }


def _write_pattern(model: Any, *_: str) -> Json:
    return {"layer_types": [TYPES[kind] for kind in model.kinds]}


def _read_rope(config: Json, _: Json, where: str) -> Json:
    names = ("rope_parameters", "rope_scaling")
    said = {name: dict(config[name]) for name in names if isinstance(config.get(name), dict)}
    for rope in said.values():
        for of_images in ("mrope_section", "mrope_interleaved"):  # a text has one position a token
            rope.pop(of_images, None)
    return rope_fields(config | said, where, partial=True)


class HybridHf(Table):
    """All of the family's Hugging Face form but the feed-forward of its layers."""

    weights = (
        WEIGHTS
        | INPUTS
        | {
            "layers.conv": f"{LINEAR}conv1d.weight",
            "layers.a_log": f"{LINEAR}A_log",
            "layers.dt_bias": f"{LINEAR}dt_bias",
            "layers.memory_norm": f"{LINEAR}norm.weight",
            "layers.out": f"{LINEAR}out_proj.weight",
        }
    )
    convs = ("layers.conv",)
    keys = NO_PLAIN | {
        "linear_num_key_heads": "linear_num_key_heads",
        "linear_num_value_heads": "linear_num_value_heads",
        "conv_tokens": "linear_conv_kernel_dim",
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD,
        Derived(_read_rope, write_partial_rope),
        Derived(_read_size, lambda model, *_: dict.fromkeys(SIZES, model.linear_head_dim)),
        Derived(_read_pattern, _write_pattern),
        Fixed("hidden_act", "silu"),
        Fixed("attention_bias", False, same=(None,)),
        NO_IDS,
    )
    defaults: ClassVar = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
        "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        **dict.fromkeys(SIZES, 128),
    }  # fmt: skip


class Qwen35Hf(HybridHf):
    """Both directions of the family's Hugging Face form."""

    name = "Qwen3.5"
    model_types: ClassVar = {"Qwen3_5ForCausalLM": "qwen3_5_text"}
    keys = HybridHf.keys | {"mlp_dim": KEYS["mlp_dim"]}


def experts_beside(*words: Words, **expected: Any) -> Experts:
    """Pair of experts with a gated one for all tokens, of whose fields `expected` are fixed."""
    widths = {"mlp_dim": "moe_intermediate_size", "shared_dim": "shared_expert_intermediate_size"}
    fixed = {n: v for n, v in SOFTMAX.items() if n != "shared_dim"} | {"shared_gate": "sigmoid"}
    return Experts(COMMON | widths, fixed | expected, words)


GATED_EXPERT = {
    "layers.router_shared": f"{BLOCK}.shared_expert_gate.weight",
    **{f"layers.shared_{name}": f"{BLOCK}.shared_expert.{name}_proj.weight"
       for name in ("gate", "up", "down")},
}  # fmt: skip


class Qwen35MoeHf(HybridHf):
    """Both directions of the Hugging Face form with experts."""

    name = "Qwen3.5 MoE"
    model_types: ClassVar = {"Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"}
    weights = HybridHf.weights | EXPERTS | GATED_EXPERT
    pairs = (*HybridHf.pairs, experts_beside(shares="chosen"))
    defaults = HybridHf.defaults | {
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "router_aux_loss_coef": 0.001,
    }  # fmt: skip

    def fused(self, config: Json, where: str) -> Fused:
        """The stacked experts of a layer, as released."""
        return stacked_experts(self.fields(config, where), "mlp.experts")
