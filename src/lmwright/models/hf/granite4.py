"""Granite 4 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.granite import SCALES, USUAL
from lmwright.models.hf.granite_moe import EXPERTS, SHARED_MLP, USUAL_EXPERTS, NamedAsReleased
from lmwright.models.hf.mamba import CONVS, HEADS, LAYER, OF_MIXER, mamba_weights, read_limits
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
from lmwright.models.mamba import Mixer

TYPES: dict[Mixer, str] = {"mamba": "mamba", "full": "attention"}  # as in the released files
NEW_TYPES: dict[Mixer, str] = {"mamba": "linear_attention", "full": "full_attention"}


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    count = fields["num_layers"]
    said = config.get("layer_types") or [TYPES["mamba"]] * count
    types = NEW_TYPES if set(said) & set(NEW_TYPES.values()) else TYPES
    return {"mixer_pattern": pattern_of(kinds_of(said, types, count, where))}


def _write_pattern(model: Any, *_: str) -> Json:
    return {"layer_types": [TYPES[kind] for kind in model.kinds]}


class Granite4Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Granite 4"
    model_types: ClassVar = {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}
    weights = WEIGHTS | {
        **SHARED_MLP,
        **mamba_weights(f"{LAYER}.mamba"),
    }
    convs = CONVS
    keys = NO_PLAIN | {"mlp_dim": "shared_intermediate_size"} | OF_MIXER
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, BIAS, ROPE, NO_IDS, SCALES,
        Derived(_read_pattern, _write_pattern),
        HEADS,
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
