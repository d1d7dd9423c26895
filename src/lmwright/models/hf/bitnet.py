"""BitNet in Hugging Face: trained floats ("online"), or packed ternary values ("offline").

Without a `quantization_config` transformers computes with the floats themselves, which is another
model.
"""

from typing import ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Words
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import WEIGHTS, Table

QUANTIZATION = "quantization_config"
ACT = Words("mlp", "hidden_act", {"relu2glu": "relu2", "swiglu": "silu"}, "relu2", "relu2")
MODES = {"online": False, "offline": True}


def how_quantized(mode: str) -> Json:
    """`quantization_config` of a folder."""
    return {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": mode,
    }


def _read_quantization(config: Json, _: Json, where: str) -> Json:
    said = config.get(QUANTIZATION)
    if not isinstance(said, dict) or said.get("quant_method") != "bitnet":
        raise UserError(
            f"{where}: {QUANTIZATION} is not BitNet's, so that its class computes with floats; "
            f"write {how_quantized('online')} there if its weights are to be ternary"
        )
    if said.get("linear_class") != "autobitlinear":
        raise UserError(
            f"{where}: {QUANTIZATION}.linear_class {said.get('linear_class')!r} divides by the "
            "scale and cannot be told from one that multiplies; take the folder with "
            "'autobitlinear'"
        )
    if said.get("quantization_mode", "offline") not in MODES:
        raise UserError(
            f"{where}: {QUANTIZATION}.quantization_mode {said['quantization_mode']!r} is not "
            f"one of {', '.join(MODES)}"
        )
    if said.get("use_rms_norm"):
        raise UserError(
            f"{where}: {QUANTIZATION}.use_rms_norm puts a norm before every projection, which "
            "is not computed here"
        )
    kept = said.get("modules_to_not_convert") or ["lm_head"]
    if kept != ["lm_head"]:
        raise UserError(
            f"{where}: {QUANTIZATION}.modules_to_not_convert {kept} leaves projections as "
            "floats; all of them are ternary here"
        )
    return {}


class BitNetHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "BitNet"
    model_types: ClassVar = {"BitNetForCausalLM": "bitnet"}
    quantized: ClassVar = True
    pairs = (
        ACT,
        HEAD,
        ROPE,
        usual_theta(500_000.0),
        Fixed("attention_bias", False, "{key} is set; BitNet here has no biases", same=(None,)),
        Derived(_read_quantization, lambda *_: {QUANTIZATION: how_quantized("online")}),
        NO_IDS,
    )
    weights = WEIGHTS | {
        "layers.attention_sub_norm": "model.layers.{i}.self_attn.attn_sub_norm.weight",
        "layers.mlp_sub_norm": "model.layers.{i}.mlp.ffn_sub_norm.weight",
    }
    defaults: ClassVar = {
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "num_key_value_heads": None,
    }  # fmt: skip


def is_packed(config: Json) -> bool:
    """True for a config.json of packed ternary values."""
    said = config.get(QUANTIZATION)
    if not isinstance(said, dict) or said.get("quant_method") != "bitnet":
        return False
    return said.get("quantization_mode", "offline") == "offline"
