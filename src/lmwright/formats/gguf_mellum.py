"""Mellum 2 in GGUF: which layers look through a window, one by one. llama.cpp rotates all layers by
the same theta, scales the rotations of global layers alone, and has experts in every layer."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats import gguf_reach
from lmwright.models.hf.moe import DENSE, TYPES
from lmwright.models.hf.rope import SIDES

NAME = "mellum"
TABLE = "qwen3moe"
"""Its tensors have this architecture's names, where the gguf package does not know it."""


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for what llama.cpp does not compute."""
    if TYPES[1] in config[DENSE]:
        raise UserError(
            f"{where}: llama.cpp's {NAME} has experts in every layer (model.dense_layers); export "
            "to a Hugging Face folder instead"
        )
    whole, local = (config["rope_parameters"][side] for side in SIDES)
    as_there = {"rope_type": "default", "rope_theta": whole["rope_theta"]}
    if SIDES[1] in config["layer_types"] and local != as_there:
        raise UserError(
            f"{where}: llama.cpp rotates {NAME}'s local layers by model.rope_theta, unscaled; set "
            f"model.local_rope_theta = {whole['rope_theta']:g}, or export to a Hugging Face folder "
            "instead"
        )
    return gguf_reach.metadata(config)


def config_of(meta: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys of config.json that say the reach of the layers. Raises UserError where the metadata do
    not."""
    num_layers = config.get("num_hidden_layers", 0)
    if not config.get("sliding_window"):
        return {"sliding_window": None, "layer_types": [SIDES[0]] * num_layers}
    return {"layer_types": gguf_reach.layer_types(meta, num_layers, NAME, where)}


def by_reach(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotations of a config.json by the reach of a layer, from those of global layers."""
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return dict(zip(SIDES, (dict(rope), plain), strict=True))
