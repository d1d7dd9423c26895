"""Helium in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, EVEN_WIDTH, HEAD, NO_IDS, Derived, Json
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import Table

BIASES = {"none": (False, False), "qkv": (True, False), "mlp": (False, True)}
"""attention_bias, which the output projection does not have, and mlp_bias."""


def _read_bias(config: Json, _: Json, where: str) -> Json:
    said = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    ours = next((ours for ours, theirs in BIASES.items() if theirs == said), None)
    if ours is None:
        raise UserError(f"{where}: attention_bias and mlp_bias together are not supported")
    return {"bias": ours}


def _write_bias(model: Any, *_: str) -> Json:
    return dict(zip(("attention_bias", "mlp_bias"), BIASES[model.bias], strict=True))


def _read_width(config: Json, fields: Json, where: str) -> Json:
    wide = EVEN_WIDTH.read(config, fields, where)["head_dim"]
    if wide != fields["head_dim"]:
        raise UserError(
            f"{where}: head_dim = {fields['head_dim']} is not hidden_size / num_attention_heads = "
            f"{wide}; correct one of them"
        )
    return {}


class HeliumHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Helium"
    model_types: ClassVar = {"HeliumForCausalLM": "helium"}
    pairs = (
        *(ACT, HEAD, ROPE, usual_theta(100_000.0), NO_IDS),
        Derived(_read_bias, _write_bias),
        Derived(_read_width, EVEN_WIDTH.write),
    )
    defaults: ClassVar = {
        "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8,
        "max_position_embeddings": 4096,
    }  # fmt: skip
