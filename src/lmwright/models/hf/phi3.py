"""Phi-3 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Json
from lmwright.models.hf.rope import ORIGINAL, rope_fields, write_partial_rope
from lmwright.models.hf.table import WEIGHTS, Table

PAD_ID = 32_000  # of padding, where config.json names none
LONG = ("su", "yarn")  # names that its first config.json files have for longrope


def _read_rope(config: Json, _: Json, where: str) -> Json:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = dict(rope) if isinstance(rope, dict) else {"rope_type": rope}
    if (rope.get("rope_type") or rope.get("type")) in LONG:
        rope["rope_type"] = "longrope"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "longrope":
        # config.json's, else the usual one: transformers ignores that in rope_parameters
        rope[ORIGINAL] = config.get(ORIGINAL) or 4096
    config = config | {"rope_scaling": None, "rope_parameters": rope}
    return rope_fields(config, where, partial=True)


def _write_rope(model: Any, *_: str) -> Json:
    kind = model.rope_scaling.kind if model.rope_scaling else "longrope"
    if kind != "longrope":
        raise UserError(
            f"model.rope_scaling: {kind!r} does not exist in Hugging Face's Phi-3, only "
            "longrope; change it to export"
        )
    return write_partial_rope(model)


PADDING = Derived(write=lambda m, *_: {"pad_token_id": None} if m.vocab_size <= PAD_ID else {})


class Phi3Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Phi-3"
    model_types: ClassVar = {"Phi3ForCausalLM": "phi3"}
    weights = WEIGHTS | {
        "layers.qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
        "layers.gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
    }
    pairs = (ACT, HEAD, Derived(_read_rope, _write_rope), PADDING)
    optional: ClassVar = {"window": "sliding_window"}
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
