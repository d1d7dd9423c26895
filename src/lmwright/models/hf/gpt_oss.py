"""gpt-oss in Hugging Face, whose files hold the experts of a layer in a few tensors
(`formats.stacked_experts`); here every expert has names of its own."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.bitnet import QUANTIZATION
from lmwright.models.hf.moe import (
    ASKED_BALANCE,
    BLOCK,
    EXPERTS,
    NO_PLAIN,
    SOFTMAX,
    UNBALANCED,
    Experts,
    MoeHf,
)
from lmwright.models.hf.pairs import BIAS, HEAD, Derived, Fixed, Json
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.table import WEIGHTS
from lmwright.models.hf.window import reach_said, window_config, window_fields, window_said
from lmwright.nn.swiglu_oai import LIMIT, STEEPNESS

WINDOW = 128  # of config.json that says none
ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
"""transformers' rotations where config.json says none."""


def _read_rope(config: Json, _: Json, where: str) -> Json:
    said = config.get("rope_scaling") or config.get("rope_parameters")
    theta = {"rope_theta": config.get("rope_theta") or 150_000.0}
    given = {**theta, **said} if isinstance(said, dict) else {**theta, **ROPE}
    return rope_fields(config | {"rope_parameters": given, "rope_scaling": None}, where)


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    reach = reach_said(config, 2, fields["num_layers"], where)
    local = window_fields(window_said(config, WINDOW, reach, where), reach)
    return {"layer_pattern": ["global"], **local}


def _write_reach(model: Any, *_: str) -> Json:
    """transformers wants a window even where `layer_types` has no layer with one."""
    return window_config(model) | {"sliding_window": model.window or WINDOW}


def _refuse_quantized(config: Json, _: Json, where: str) -> Json:
    said = config.get(QUANTIZATION)
    if said and (not isinstance(said, dict) or said.get("quant_method") != "mxfp4"):
        raise UserError(
            f"{where}: {QUANTIZATION} is not mxfp4, the only form that is read; start from the "
            "released or the unquantized model"
        )
    return {}


class GptOssHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "gpt-oss"
    model_types: ClassVar = {"GptOssForCausalLM": "gpt_oss"}
    weights = WEIGHTS | EXPERTS | {
        "layers.sinks": "model.layers.{i}.self_attn.sinks",
        "layers.router": f"{BLOCK}.router.weight",
        "layers.router_logit_bias": f"{BLOCK}.router.bias",
        **{f"layers.expert_{name}_bias": f"{BLOCK}.experts.{{}}.{name}_proj.bias"
           for name in ("gate", "up", "down")},
    }  # fmt: skip
    stacked_experts = "turns"
    quantized = True
    null = (*MoeHf.null, "swiglu_limit", "swiglu_alpha")
    keys = NO_PLAIN
    pairs = (
        *(HEAD, BIAS),
        Derived(
            _read_rope,
            lambda model, *_: rope_config(model.rope_theta, model.rope_scaling, model.seq_len),
        ),
        Derived(_read_reach, _write_reach),
        Derived(_refuse_quantized),
        Fixed("hidden_act", "silu"),
        Fixed("swiglu_limit", LIMIT),
        Fixed("swiglu_alpha", STEEPNESS),
        Experts(
            UNBALANCED | {"mlp_dim": "intermediate_size"},
            SOFTMAX | {"shares": "chosen", "bias": "all"},
            (),
        ),
        ASKED_BALANCE,  # a weight of 0.9 in released folders
        Derived(write=lambda model, *_: {"num_local_experts": model.experts.num_experts}),
    )
    defaults: ClassVar = {
        "attention_bias": True, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    }  # fmt: skip
