"""Mamba-2 in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.mamba import CONVS, expansion, mamba_weights, read_limits, refuse_widths
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair, refuse_number
from lmwright.models.hf.table import Table

LAYER = "backbone.layers.{i}"
USUAL_LENGTH = 8192
NOT_SUPPORTED = "{key} is not supported"


def _read_expand(config: Json, fields: Json, where: str) -> Json:
    refuse_number("expand", config["expand"], where)
    heads = {"num_heads": fields["mamba_num_heads"], "head_dim": fields["mamba_head_dim"]}
    inner = config["expand"] * fields["embed_dim"]
    refuse_widths(heads, inner, "expand times hidden_size, ", where)
    return {}


class Mamba2Hf(Table):
    """Both directions of the family's Hugging Face form. Rows have no longest length over there;
    `max_position_embeddings` keeps ours, and is 8,192 where it is missing."""

    name = "Mamba-2"
    model_types: ClassVar = {"Mamba2ForCausalLM": "mamba2"}
    weights: ClassVar = {
        "embed": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
        "layers.attention_norm": f"{LAYER}.norm.weight",
        **mamba_weights(f"{LAYER}.mixer"),
    }
    convs = CONVS
    peft_refuses = ("mamba_out",)
    keys: ClassVar = {
        "vocab_size": "vocab_size", "embed_dim": "hidden_size", "num_layers": "num_hidden_layers",
        "seq_len": "max_position_embeddings", "norm_eps": "layer_norm_epsilon",
        "mamba_num_heads": "num_heads", "mamba_head_dim": "head_dim",
        "mamba_state_dim": "state_size", "mamba_num_groups": "n_groups",
        "conv_tokens": "conv_kernel",
    }  # fmt: skip
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, NO_IDS,
        Derived(_read_expand, lambda m, name, _: {"expand": expansion(m, name)}),
        Derived(read_limits),
        Derived(write=lambda model, *_: {"chunk_size": model.chunk_tokens}),
        Fixed("hidden_act", "silu", same=(None,)),
        Fixed("use_conv_bias", True),
        Fixed("use_bias", False, NOT_SUPPORTED, same=(None,)),
    )  # fmt: skip
    defaults: ClassVar = {
        "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64,
        "max_position_embeddings": USUAL_LENGTH, "layer_norm_epsilon": 1e-5, "num_heads": 128,
        "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    }  # fmt: skip
