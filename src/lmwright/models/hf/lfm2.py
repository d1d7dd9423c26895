"""LFM2 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.gemma import HEAD
from lmwright.models.hf.moe import (
    NEW_BIAS_RATE,
    NO_PLAIN,
    SIGMOID,
    Experts,
    MoeHf,
    first_dense,
)
from lmwright.models.hf.pairs import NO_IDS, Derived, Fixed, Json, refuse_number
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import KEYS, WEIGHTS, Table
from lmwright.models.hf.window import kinds_of, pattern_of
from lmwright.models.lfm2 import Mixer, mixers

LAYER, FFN = "model.layers.{i}", "model.layers.{i}.feed_forward"
LINEARS = {"gate": "w1", "up": "w3", "down": "w2"}
SHARED = WEIGHTS | {
    "norm": "model.embedding_norm.weight",
    "layers.attention_norm": f"{LAYER}.operator_norm.weight",
    "layers.mlp_norm": f"{LAYER}.ffn_norm.weight",
    "layers.q_norm": f"{LAYER}.self_attn.q_layernorm.weight",
    "layers.k_norm": f"{LAYER}.self_attn.k_layernorm.weight",
    "layers.o": f"{LAYER}.self_attn.out_proj.weight",
    "layers.conv_in": f"{LAYER}.conv.in_proj.weight",
    "layers.conv": f"{LAYER}.conv.conv.weight",
    "layers.conv_out": f"{LAYER}.conv.out_proj.weight",
    **{f"layers.{ours}": f"{FFN}.{theirs}.weight" for ours, theirs in LINEARS.items()},
}
TYPES: dict[Mixer, str] = {"conv": "conv", "full": "full_attention"}
OWN_KEYS = {"norm_eps": "norm_eps", "conv_tokens": "conv_L_cache"}
TIED = "tie_embedding"
"""Key of the released files that transformers prefers to its own."""


def _read_head(config: Json, fields: Json, where: str) -> Json:
    said = {"tie_word_embeddings": config[TIED]} if TIED in config else {}
    return HEAD.read(config | said, fields, where)


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    said, full = config.get("layer_types"), config.get("full_attn_idxs")
    if said is None:
        all_layers = range(fields["num_layers"])
        said = [TYPES["conv" if full and i not in full else "full"] for i in all_layers]
    return {"mixer_pattern": pattern_of(kinds_of(said, TYPES, fields["num_layers"], where))}


def _write_pattern(model: Any, *_: str) -> Json:
    return {"layer_types": [TYPES[mixer] for mixer in mixers(model)]}


def _read_width(config: Json, _: Json, where: str) -> Json:
    """The width of the mlp, which released files say as that of one without a gate."""
    name = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    width: Any = config.get(name)
    refuse_number(name, width, where, whole=True)
    if config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            refuse_number("block_ffn_dim_multiplier", factor, where)
            refuse_number("block_multiple_of", of := config["block_multiple_of"], where, whole=True)
            width = -(-int(factor * width) // of) * of
    return {"mlp_dim": width}


def _write_width(model: Any, *_: str) -> Json:
    return {"intermediate_size": model.mlp_dim, "block_auto_adjust_ff_dim": False}


LAYERS = (
    Derived(_read_head, HEAD.write),
    ROPE,
    usual_theta(1_000_000.0),
    Derived(_read_pattern, _write_pattern),
    Fixed("conv_bias", False, same=(None,)),
    NO_IDS,
)
USUAL: Json = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "max_position_embeddings": 128_000,
    "vocab_size": 65_536, "conv_L_cache": 3,
}  # fmt: skip


class Lfm2Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "LFM2"
    model_types: ClassVar = {"Lfm2ForCausalLM": "lfm2"}
    weights = SHARED
    convs = ("layers.conv",)
    keys = NO_PLAIN | OWN_KEYS
    pairs = (*LAYERS, Derived(_read_width, _write_width))
    defaults: ClassVar = USUAL | {
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    }  # fmt: skip


def _read_bias(config: Json, fields: Json, where: str) -> Json:
    rate = NEW_BIAS_RATE if config["use_expert_bias"] else None
    return {"experts": fields["experts"] | {"bias_rate": rate}}


def _write_bias(model: Any, *_: str) -> Json:
    return {"use_expert_bias": model.experts.bias_rate is not None}


class Lfm2MoeHf(MoeHf):
    """Both directions of the Hugging Face form with experts."""

    name = "LFM2 MoE"
    model_types: ClassVar = {"Lfm2MoeForCausalLM": "lfm2_moe"}
    weights = SHARED | {
        "layers.router": f"{FFN}.gate.weight",
        "layers.router_bias": f"{FFN}.expert_bias",
        **{f"layers.expert_{ours}": f"{FFN}.experts.{{}}.{theirs}.weight"
           for ours, theirs in LINEARS.items()},
    }  # fmt: skip
    convs = ("layers.conv",)
    keys = NO_PLAIN | OWN_KEYS | {"mlp_dim": KEYS["mlp_dim"]}
    pairs = (
        *LAYERS,
        Experts(
            {
                "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
                "mlp_dim": "moe_intermediate_size", "scale": "routed_scaling_factor",
            },
            SIGMOID | {"num_groups": 1, "shared_dim": None},
        ),
        Derived(_read_bias, _write_bias),
        first_dense("num_dense_layers"),
    )  # fmt: skip
    defaults: ClassVar = USUAL | {
        "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "num_dense_layers": 2,
        "use_expert_bias": True, "norm_topk_prob": True,
    }  # fmt: skip
