"""Granite 4 in Hugging Face."""

import math
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar

from lmwright.config.fields import default_of
from lmwright.errors import UserError
from lmwright.models.hf.granite import SCALES, USUAL
from lmwright.models.hf.granite_moe import EXPERTS, SHARED_MLP, USUAL_EXPERTS, NamedAsReleased
from lmwright.models.hf.mamba import CONVS, head_width, mamba_weights, read_limits
from lmwright.models.hf.moe import NO_PLAIN
from lmwright.models.hf.pairs import (
    BIAS,
    HEAD,
    NO_IDS,
    Derived,
    Fixed,
    Json,
    Pair,
    Words,
)
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Table
from lmwright.models.hf.window import kinds_of, pattern_of
from lmwright.models.mamba import MAMBA, Mamba, Mixer

SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "conv_tokens")
"""Fields of layers with Mamba-2."""
LAYER = "model.layers.{i}"
TYPES: dict[Mixer, str] = {"mamba": "mamba", "full": "attention"}  # as in the released files
NEW_TYPES: dict[Mixer, str] = {"mamba": "linear_attention", "full": "full_attention"}


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    count = fields["num_layers"]
    said = config.get("layer_types") or [TYPES["mamba"]] * count
    types = NEW_TYPES if set(said) & set(NEW_TYPES.values()) else TYPES
    return {"mixer_pattern": pattern_of(kinds_of(said, types, count, where))}


def _write_pattern(model: Any, *_: str) -> Json:
    return {"layer_types": [TYPES[kind] for kind in model.kinds]}


def _read_heads(config: Json, fields: Json, where: str) -> Json:
    if MAMBA not in fields["mixer_pattern"]:  # what config.json says has no effect
        return {
            each.name: default_of(each) for each in dataclass_fields(Mamba) if each.name in SIZES
        }
    heads, inner = fields["mamba_num_heads"], config["mamba_expand"] * fields["embed_dim"]
    return head_width(config, heads, inner, "mamba_expand times hidden_size, ", where)


def _write_heads(model: Any, architecture: str, _: str) -> Json:
    if MAMBA not in model.kinds:  # such as transformers takes
        heads = math.gcd(2 * model.embed_dim, 128)
        width = 2 * model.embed_dim // heads
        return {"mamba_n_heads": heads, "mamba_d_head": width, "mamba_expand": 2}
    if model.inner_dim % model.embed_dim:
        raise UserError(
            f"model.mamba_num_heads: {model.mamba_num_heads} heads of {model.mamba_head_dim} are "
            f"not a multiple of model.embed_dim = {model.embed_dim}, as in {architecture}; change "
            "them to export"
        )
    return {
        "mamba_d_head": model.mamba_head_dim, "mamba_expand": model.inner_dim // model.embed_dim,
    }  # fmt: skip


class Granite4Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Granite 4"
    model_types: ClassVar = {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}
    weights = WEIGHTS | {
        **SHARED_MLP,
        **mamba_weights(f"{LAYER}.mamba"),
    }
    convs = CONVS
    keys = NO_PLAIN | {
        "mlp_dim": "shared_intermediate_size", "mamba_num_heads": "mamba_n_heads",
        "mamba_num_groups": "mamba_n_groups", "mamba_state_dim": "mamba_d_state",
        "conv_tokens": "mamba_d_conv",
    }  # fmt: skip
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, BIAS, ROPE, NO_IDS, SCALES,
        Derived(_read_pattern, _write_pattern),
        Derived(_read_heads, _write_heads),
        Words("rotation", "position_embedding_type", {"rope": "rope", "nope": "nope"}, "nope",
              "nope"),
        Fixed("hidden_act", "silu", same=(None,)),
        Derived(read_limits),
        Derived(write=lambda model, *_: {"mamba_chunk_size": model.chunk_tokens}),
        Fixed("mamba_conv_bias", True, same=(None,)),
        Fixed("mamba_proj_bias", False, same=(None,)),
        Derived(write=lambda *_: {"num_local_experts": 0, "num_experts_per_tok": 0}),
    )  # fmt: skip
    defaults: ClassVar = USUAL | {
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
        "mamba_d_conv": 4, "mamba_expand": 2,
        "shared_intermediate_size": 1024,
    }  # fmt: skip


class Granite4MoeHf(NamedAsReleased, Granite4Hf):
    """Both directions of the Hugging Face form with experts."""

    name = "Granite 4 with experts"
    mark = "num_local_experts"
    weights = NamedAsReleased.weights | Granite4Hf.weights
    pairs = (*Granite4Hf.pairs, *EXPERTS)
    defaults = Granite4Hf.defaults | USUAL_EXPERTS
