"""Granite 3 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.pairs import ACT, HEAD, NO_IDS, Derived, Json, refuse_number
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import Table

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier",
               "logits_scaling")  # fmt: skip


def _read_multipliers(config: Json, _: Json, where: str) -> Json:
    for name in MULTIPLIERS:
        refuse_number(name, config[name], where)
    return {name: float(config[name]) for name in MULTIPLIERS}


def _write_multipliers(model: Any, *_: str) -> Json:
    same = {name: getattr(model, name) for name in MULTIPLIERS}
    return same | {"attention_multiplier": model.score_scale}


SCALES = Derived(_read_multipliers, _write_multipliers)
"""Pair of the four multipliers."""
USUAL: Json = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    **dict.fromkeys(MULTIPLIERS, 1.0),
}


class GraniteHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Granite"
    model_types: ClassVar = {"GraniteForCausalLM": "granite"}
    pairs = (ACT, HEAD, BIAS, ROPE, NO_IDS, SCALES)
    defaults: ClassVar = USUAL
