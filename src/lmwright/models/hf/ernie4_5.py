"""ERNIE 4.5 in Hugging Face.

moe_layer_start_index, moe_layer_end_index    first and last layer that may have experts
moe_layer_interval                            of these, each layer whose number, from 1 on, is a
                                              multiple
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.moe import (
    ASKED_BALANCE,
    BLOCK,
    EXPERTS,
    NEW_BIAS_RATE,
    SHARED_EXPERTS,
    Experts,
    MoeHf,
    refuse_unbiased,
)
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Fixed, Json, Words
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import WEIGHTS, Table

THETA = 500_000.0  # where config.json says none
FIRST, LAST, EVERY = (f"moe_layer_{end}" for end in ("start_index", "end_index", "interval"))
SHARED = "moe_num_shared_experts"
EXPERT_KEYS = {
    "num_experts": "moe_num_experts", "experts_per_token": "moe_k",
    "mlp_dim": "moe_intermediate_size",
}  # fmt: skip
SOFTMAX_BIASED = {
    "score": "softmax", "shares": "chosen", "scale": 1.0, "num_groups": 1, "shared_gate": "none",
    "capacity_factor": None,
}  # fmt: skip
NO_BIAS = Fixed("use_bias", False, "{key} = {said} is not computed with experts", same=(None,))


class Ernie45Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "ERNIE 4.5"
    model_types: ClassVar = {"Ernie4_5ForCausalLM": "ernie4_5"}
    pairs = (
        ACT,
        HEAD,
        Words("bias", "use_bias", {"all": True, "none": False}),
        ROPE,
        usual_theta(THETA),
    )
    defaults: ClassVar = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    }  # fmt: skip


def dense_layers(first: int, last: int, every: int, num_layers: int) -> list[int]:
    """Numbers of the plain layers."""
    return [i for i in range(num_layers) if not first <= i <= last or (i + 1) % every]


def _read_layers(config: Json, fields: Json, where: str) -> Json:
    num_layers, said = fields["num_layers"], [config[key] for key in (FIRST, LAST, EVERY)]
    if not all(isinstance(each, int) for each in said) or said[2] < 1:
        raise UserError(
            f"{where}: {FIRST} = {said[0]!r}, {LAST} = {said[1]!r} and {EVERY} = {said[2]!r} must "
            "be numbers of layers; correct them"
        )
    first, last, every = said
    last = num_layers - 1 if last == -1 else last
    return {"dense_layers": dense_layers(first, last, every, num_layers)}


def _write_layers(model: Any, architecture: str, _: str) -> Json:
    dense, layers = list(model.dense_layers), range(model.num_layers)
    sparse = [i for i in layers if i not in dense]
    for every in layers:
        said = (sparse[0], sparse[-1], every + 1)
        if dense_layers(*said, model.num_layers) == dense:
            return dict(zip((FIRST, LAST, EVERY), said, strict=True))
    raise UserError(
        f"model.dense_layers: {architecture} has experts in each layer of a stretch, or in every "
        f"so many of them, and plain ones are {dense} here; change it to export"
    )


def _read_experts(config: Json, fields: Json, where: str) -> Json:
    own, count = fields["experts"], config[SHARED]
    if not isinstance(count, int) or count < 0:
        raise UserError(f"{where}: {SHARED} = {count!r} is not 0 or a positive number; correct it")
    shared = count * own["mlp_dim"] or None
    return {"experts": own | {"bias_rate": NEW_BIAS_RATE, "shared_dim": shared}}


def _write_experts(model: Any, architecture: str, family: str) -> Json:
    refuse_unbiased(model, architecture, family)
    count, rest = divmod(model.experts.shared_dim or 0, model.experts.mlp_dim)
    if rest:
        raise UserError(
            f"model.experts.shared_dim: {architecture} has shared experts of a multiple of "
            "model.experts.mlp_dim; change it to export"
        )
    return {SHARED: count}


class Ernie45MoeHf(MoeHf):
    """Both directions of the Hugging Face form with experts."""

    name = "ERNIE 4.5 with experts"
    model_types: ClassVar = {"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"}
    weights = WEIGHTS | EXPERTS | SHARED_EXPERTS | {
        "layers.router_bias": f"{BLOCK}.moe_statics.e_score_correction_bias",
    }  # fmt: skip
    rows = ("layers.router_bias",)
    null = (*MoeHf.null, FIRST, LAST, EVERY, SHARED)
    aliases: ClassVar = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    pairs = (
        *(ACT, HEAD, ROPE, usual_theta(THETA), NO_BIAS, Derived(_read_layers, _write_layers)),
        Experts(EXPERT_KEYS, SOFTMAX_BIASED, ()),
        *(Derived(_read_experts, _write_experts), ASKED_BALANCE),
        Fixed("moe_norm_min", 1e-12),
        Fixed("moe_gate_act", "softmax", same=(None,), written=False),
    )
    defaults: ClassVar = {
        **{n: value for n, value in Ernie45Hf.defaults.items() if n != "head_dim"},
        "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "router_aux_loss_coef": 0.001,
        "moe_intermediate_size": 1536, "intermediate_size": 12_288, SHARED: 2, FIRST: 1, LAST: -1,
        EVERY: 1,
    }  # fmt: skip
