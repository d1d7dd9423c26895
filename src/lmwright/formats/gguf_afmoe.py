"""AFMoE in GGUF: in llama.cpp all layers but every fourth have windows and rotate, and embeddings
are multiplied by the root of their width."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats import gguf_deepseek
from lmwright.formats.gguf_reach import types_of_every
from lmwright.models.hf.afmoe import DENSE, SHARED, WINDOW

NAME = "afmoe"
KEYS = {
    "leading_dense_block_count": DENSE,
    "expert_shared_count": SHARED,
    "expert_weights_scale": "route_scale",
}
FIXED = {"hidden_act": "silu", "attention_bias": False, "mup_enabled": True}


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for another order of windows."""
    if config["layer_types"] != types_of_every(4, config["num_hidden_layers"]):
        raise UserError(
            f"{where}: llama.cpp's {NAME} has windows in all layers but every fourth "
            "(model.layer_pattern); export to a Hugging Face folder instead"
        )
    return {gguf_deepseek.GATING: gguf_deepseek.SIGMOID, "expert_weights_norm": True}


def config_of(meta: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys of config.json that the metadata leave out. Raises UserError for other routing."""
    gating = meta.get(f"{NAME}.{gguf_deepseek.GATING}", gguf_deepseek.SIGMOID)
    if gating != gguf_deepseek.SIGMOID or not meta.get(f"{NAME}.expert_weights_norm"):
        raise UserError(
            f"{where}: {NAME} with routing weights other than sigmoids normalized over the chosen "
            "experts is not computed; use another conversion"
        )
    layers = types_of_every(4, config.get("num_hidden_layers", 0))
    return {"layer_types": layers, "sliding_window": config.get("sliding_window", WINDOW)}
