"""Seed-OSS in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Fixed, Json
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import Table

BIASES = {"none": (False, False), "qkv": (True, False), "attention": (True, True)}
"""attention_bias and attention_out_bias."""


def _read_bias(config: Json, _: Json, where: str) -> Json:
    said = bool(config.get("attention_bias", True)), bool(config.get("attention_out_bias"))
    ours = next((ours for ours, theirs in BIASES.items() if theirs == said), None)
    if ours is None:
        raise UserError(f"{where}: attention_out_bias without attention_bias is not supported")
    return {"bias": ours}


def _write_bias(model: Any, *_: str) -> Json:
    return dict(zip(("attention_bias", "attention_out_bias"), BIASES[model.bias], strict=True))


class SeedOssHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Seed-OSS"
    model_types: ClassVar = {"SeedOssForCausalLM": "seed_oss"}
    pairs = (
        ACT,
        HEAD,
        Derived(_read_bias, _write_bias),
        Fixed("mlp_bias", False, "{key} is not supported", same=(None,)),
        ROPE,
    )
    defaults: ClassVar = {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524_288,
    }  # fmt: skip
