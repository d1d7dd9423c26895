"""Falcon-H1 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.mamba import (
    CONVS,
    LAYER,
    OF_MIXER,
    WEIGHTS_BESIDE,
    head_width,
    mamba_weights,
    read_limits,
)
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair, refuse_number
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import KEYS, Table

MIXER = f"{LAYER}.mamba"
NUMBERS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
"""Multipliers of several parts, and how many there are."""
NORMS = {(False, True): "none", (False, False): "none", (True, True): "before",
         (True, False): "behind"}  # fmt: skip
NOT_SUPPORTED = "{key} is not supported"


def _read_multipliers(config: Json, _: Json, where: str) -> Json:
    fields: Json = {}
    for name in NUMBERS:
        refuse_number(name, config[name], where)
        fields[name] = float(config[name])
    for name, count in LISTS.items():
        said = [1.0] * count if config.get(name) is None else config[name]
        if not isinstance(said, list) or len(said) != count:
            raise UserError(
                f"{where}: {name} = {said!r} is not a list of {count} numbers; correct it, or "
                "download the file again"
            )
        for each in said:
            refuse_number(name, each, where)
        fields[name] = tuple(map(float, said))
    return fields


def _write_multipliers(model: Any, *_: str) -> Json:
    lists = {name: list(getattr(model, name)) for name in LISTS}
    return {name: getattr(model, name) for name in NUMBERS} | lists


def _read_heads(config: Json, fields: Json, where: str) -> Json:
    heads, inner = fields["mamba_num_heads"], config["mamba_d_ssm"]
    refuse_number("mamba_n_heads", heads, where, whole=True)
    if inner is None:
        refuse_number("mamba_expand", config["mamba_expand"], where)
        inner = int(config["mamba_expand"] * fields["embed_dim"])
    refuse_number("mamba_d_ssm", inner, where, whole=True)
    return head_width(config, heads, inner, "mamba_d_ssm = ", where)


def _write_heads(model: Any, *_: str) -> Json:
    return {"mamba_d_head": model.mamba_head_dim, "mamba_d_ssm": model.inner_dim}


def _read_norm(config: Json, *_: Any) -> Json:
    said = bool(config["mamba_rms_norm"]), bool(config["mamba_norm_before_gate"])
    return {"mamba_norm": NORMS[said]}


def _write_norm(model: Any, *_: str) -> Json:
    norm = model.mamba_norm
    return {"mamba_rms_norm": norm != "none", "mamba_norm_before_gate": norm == "before"}


class FalconH1Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Falcon-H1"
    model_types: ClassVar = {"FalconH1ForCausalLM": "falcon_h1"}
    weights: ClassVar = WEIGHTS_BESIDE | mamba_weights(MIXER)
    convs = CONVS
    peft_refuses = ("mamba_out",)
    keys = KEYS | OF_MIXER
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, BIAS, ROPE, NO_IDS,
        Derived(_read_multipliers, _write_multipliers),
        Derived(_read_heads, _write_heads),
        Derived(_read_norm, _write_norm),
        Derived(read_limits),
        Derived(write=lambda model, *_: {"mamba_chunk_size": model.chunk_tokens}),
        Fixed("hidden_act", "silu", same=(None,)),
        Fixed("mamba_conv_bias", True),
        *(Fixed(key, False, NOT_SUPPORTED, same=(None,))
          for key in ("mamba_proj_bias", "projectors_bias")),
    )  # fmt: skip
    defaults: ClassVar = {
        "num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128,
        "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_rms_norm": False, "mamba_norm_before_gate": True,
        **dict.fromkeys(NUMBERS, 1.0),
    }  # fmt: skip
