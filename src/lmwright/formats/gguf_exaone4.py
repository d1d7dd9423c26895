"""EXAONE 4 in GGUF: llama.cpp takes a model of 64 layers for the released 32B, whose layers have
windows but every fourth; it computes no other one with windows. K-EXAONE says its windows layer by
layer."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats import gguf_deepseek, gguf_reach
from lmwright.formats.gguf_ernie import WIDTH
from lmwright.models.hf.exaone4 import USUAL
from lmwright.models.hf.exaone_moe import SHARED
from lmwright.models.hf.window import TYPES

NAME, MOE = "exaone4", "exaone-moe"
MOE_KEYS = gguf_deepseek.KEYS | {"expert_shared_count": SHARED}
WITH_WINDOWS = 64


def refuse(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for windows where llama.cpp computes none, or the other way round."""
    num_layers, window = config["num_hidden_layers"], config["sliding_window"]
    as_there = window is None
    if num_layers == WITH_WINDOWS:
        as_there = window is not None and config["layer_types"] == gguf_reach.types_of_every(
            4, num_layers
        )
    if not as_there:
        raise UserError(
            f"{where}: llama.cpp has windows only in an EXAONE 4 of {WITH_WINDOWS} layers, in all "
            "but every fourth (model.window, model.layer_pattern); export to a Hugging Face folder "
            "instead"
        )


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json by llama.cpp's rule, of one that the metadata gave."""
    num_layers = config.get("num_hidden_layers", 0)
    if num_layers != WITH_WINDOWS:
        return {"sliding_window": None}
    window = config.get("sliding_window", USUAL)
    return {"sliding_window": window, "layer_types": gguf_reach.types_of_every(4, num_layers)}


def moe_metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name of a model with experts. Raises UserError for global
    layers alone, with which llama.cpp ends."""
    if TYPES["local"] not in config["layer_types"]:
        raise UserError(
            f"{where}: llama.cpp's {MOE} has layers with a window (model.layer_pattern); export to "
            "a Hugging Face folder instead"
        )
    shared = {WIDTH: config[SHARED] * config["moe_intermediate_size"]}
    return gguf_reach.metadata(config) | shared


def moe_config_of(meta: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys of config.json of a model with experts; where the metadata are silent, llama.cpp has
    windows in all layers but every fourth."""
    num_layers = config.get("num_hidden_layers", 0)
    return {"layer_types": gguf_reach.layer_types(meta, num_layers, MOE, where, usual=4)}
