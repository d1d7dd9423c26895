"""Phi-3.5-MoE in Hugging Face."""

import math
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.moe import (
    BLOCK,
    COMMON,
    NO_PLAIN,
    NUMBERED_EXPERTS,
    SOFTMAX,
    SPARSE,
    Experts,
    MoeHf,
)
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS, Derived, Json, Words, refuse_number
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import STREAM_BIASES, WEIGHTS

LENGTHS = ("short_mscale", "long_mscale")
"""Lengths of queries and keys in short and in long rows."""
JITTER, CHOSEN = "router_jitter_noise", "num_experts_per_tok"


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    said = rope if isinstance(rope, dict) else {}
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in ("default", "longrope"):
        raise UserError(
            f"{where}: rope scaling {kind!r} is not computed for Phi-3.5-MoE; it is longrope"
        )
    plain = {name: value for name, value in said.items() if name not in LENGTHS}
    lengths: list[Any] = [said.get(name) for name in LENGTHS]
    if kind == "longrope":
        for name, length in zip(LENGTHS, lengths, strict=True):
            refuse_number(f"rope_scaling.{name}", length, where)
        if lengths[0] != lengths[1]:
            raise UserError(
                f"{where}: short_mscale = {lengths[0]} and long_mscale = {lengths[1]} differ, "
                "which is not computed; make them equal"
            )
        plain["attention_factor"] = lengths[0]
    rope = plain if isinstance(rope, dict) else rope
    own = ROPE.read(config | {"rope_scaling": None, "rope_parameters": rope}, fields, where)
    if (scaling := own["rope_scaling"]) and math.isclose(lengths[0], _usual(**scaling)):
        del scaling["attention_factor"]
    return own


def _usual(factor: float, original_seq_len: int, **_: Any) -> float:
    """The length of queries and keys where a run says none."""
    return math.sqrt(1 + math.log(factor) / math.log(original_seq_len))


def _write_rope(model: Any, *names: str) -> Json:
    config, scaling = ROPE.write(model, *names), model.rope_scaling
    if scaling is None:
        return config
    if scaling.kind != "longrope":
        raise UserError(
            f"model.rope_scaling: {scaling.kind!r} does not exist in Hugging Face's Phi-3.5-MoE, "
            "only longrope; change it to export"
        )
    length = scaling.attention_factor or _usual(scaling.factor, scaling.original_seq_len)
    lengths = dict.fromkeys(LENGTHS, length)
    for key in ("rope_parameters", "rope_scaling"):
        config[key] = config[key] | lengths
        config[key].pop("attention_factor", None)
    return config


def _read_near(config: Json, fields: Json, where: str) -> Json:
    """Each of two choices against what comes near it."""
    if (chosen := config[CHOSEN]) != 2:
        raise UserError(
            f"{where}: {CHOSEN} = {chosen!r} is not computed; Phi-3.5-MoE takes 2 whatever it says"
        )
    if (jitter := config[JITTER]) != 0:
        refuse_number(JITTER, jitter, where)
    return {"experts": fields["experts"] | {"margin": 2 * jitter}}


def _write_near(model: Any, architecture: str, _: str) -> Json:
    if (chosen := model.experts.experts_per_token) != 2:
        raise UserError(
            f"model.experts.experts_per_token: {architecture} takes 2, not {chosen}; change it to "
            "export"
        )
    # without noise on what layers read in training, which is not computed here
    return {JITTER: model.experts.margin / 2, "input_jitter_noise": 0.0}


class PhimoeHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Phi-3.5-MoE"
    model_types: ClassVar = {"PhimoeForCausalLM": "phimoe", "PhiMoEForCausalLM": "phimoe"}
    weights = WEIGHTS | STREAM_BIASES | NUMBERED_EXPERTS | {"head_bias": "lm_head.bias"}
    modules: ClassVar = {f"{SPARSE}.gate": f"{BLOCK}.router"}
    keys = NO_PLAIN
    optional: ClassVar = {"window": "sliding_window"}
    pairs = (
        *(ACT, HEAD, BIAS, Derived(_read_rope, _write_rope), usual_theta(1_000_000.0), NO_IDS),
        Words("head_bias", "lm_head_bias", {"all": True, "none": False}),
        Experts(COMMON | {"mlp_dim": "intermediate_size"}, SOFTMAX | {"shares": "near"}, ()),
        Derived(write=lambda model, *_: {"num_local_experts": model.experts.num_experts}),
        Derived(_read_near, _write_near),
    )
    defaults: ClassVar = {
        "num_experts": 16, CHOSEN: 2, "router_aux_loss_coef": 0.001, JITTER: 0.01,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "vocab_size": 32_064, "hidden_size": 4096, "intermediate_size": 6400,
        "num_hidden_layers": 32, "num_attention_heads": 32,
    }  # fmt: skip
