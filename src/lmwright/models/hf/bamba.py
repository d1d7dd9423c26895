"""Bamba in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.mamba import (
    CONVS,
    HEADS,
    LAYER,
    OF_MIXER,
    WEIGHTS_BESIDE,
    mamba_weights,
    read_limits,
)
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair
from lmwright.models.hf.rope import rope_fields, write_partial_rope
from lmwright.models.hf.table import KEYS, Table
from lmwright.models.hf.window import pattern_of
from lmwright.models.mamba import Mixer

FULL = "attn_layer_indices"
USUAL_PART = {"partial_rotary_factor": 0.5}
"""What transformers takes wherever `rope_parameters` do not say another."""


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    said, count = config.get(FULL) or [], fields["num_layers"]
    if not isinstance(said, list) or not all(each in range(count) for each in said):
        raise UserError(
            f"{where}: {FULL} = {said!r} is no list of layers from 0 to {count - 1}; correct it"
        )
    kinds: list[Mixer] = ["full" if i in said else "mamba" for i in range(count)]
    return {"mixer_pattern": pattern_of(kinds)}


def _write_pattern(model: Any, *_: str) -> Json:
    return {FULL: [i for i, kind in enumerate(model.kinds) if kind == "full"]}


def _read_rope(config: Json, _: Json, where: str) -> Json:
    return rope_fields(config | USUAL_PART, where, partial=True)


def _write_rope(model: Any, *_: str) -> Json:
    # the number beside the share is for vLLM and llama.cpp
    return write_partial_rope(model) | {"attn_rotary_emb": model.rotary_dim}


class BambaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Bamba"
    model_types: ClassVar = {"BambaForCausalLM": "bamba"}
    weights: ClassVar = WEIGHTS_BESIDE | mamba_weights(f"{LAYER}.mamba")
    convs = CONVS
    keys = KEYS | OF_MIXER
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, BIAS, NO_IDS,
        Derived(_read_rope, _write_rope),
        Derived(_read_pattern, _write_pattern),
        HEADS,
        Derived(read_limits),
        Derived(write=lambda model, *_: {"mamba_chunk_size": model.chunk_tokens}),
        Fixed("hidden_act", "silu", same=(None,)),
        Fixed("mamba_conv_bias", True, same=(None,)),
        Fixed("mamba_proj_bias", False, same=(None,)),
    )  # fmt: skip
    defaults: ClassVar = {
        "num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
