"""Ministral 3 in Hugging Face: rotations that also say how queries grow."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, HEAD, NO_IDS, Derived, Fixed, Json
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.table import Table

GROWTH = "llama_4_scaling_beta"
CONTEXT = "max_position_embeddings"  # within the rotations, where transformers repeats it


def read_growing(config: Json, family: str, where: str) -> Json:
    """Rotations and how queries grow. Raises UserError for what the family does not compute."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    growth = rope.get(GROWTH) if isinstance(rope, dict) else None
    if not isinstance(growth, int | float) or isinstance(growth, bool) or growth < 0:
        raise UserError(
            f"{where}: rope_parameters.{GROWTH} = {growth!r} is not 0 or a positive number; "
            "download it again"
        )
    plain = {name: value for name, value in rope.items() if name not in (GROWTH, CONTEXT)}
    fields = rope_fields(config | {"rope_parameters": plain, "rope_scaling": None}, where)
    if (fields["rope_scaling"] or {}).get("kind") != "yarn":
        raise UserError(f"{where}: rope_parameters without YaRN are not computed for {family}")
    return fields | {"query_growth": float(growth)}


def write_growing(model: Any, *_: str) -> Json:
    """The keys that say both."""
    config = rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
    del config["rope_scaling"]  # of which transformers would not read how queries grow
    return config | {"rope_parameters": {**config["rope_parameters"], GROWTH: model.query_growth}}


class Ministral3Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Ministral 3"
    model_types: ClassVar = {"Ministral3ForCausalLM": "ministral3"}
    pairs = (
        ACT,
        HEAD,
        Derived(lambda config, _, where: read_growing(config, "Ministral 3", where), write_growing),
        Fixed("sliding_window", None, "{key} = {said} is not computed for Ministral 3"),
        NO_IDS,
    )
    defaults: ClassVar = {
        "max_position_embeddings": 262_144, "head_dim": 128, "num_key_value_heads": 8,
    }  # fmt: skip
