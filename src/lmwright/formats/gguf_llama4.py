"""Llama 4's text model in GGUF. llama.cpp has chunks of 8192 tokens in all layers but every fourth,
in which queries grow as in the released models, and norms behind rotations but for 128 experts."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_deepseek import GATING, SIGMOID
from lmwright.models.hf.llama4 import CHUNK, GROWTH, ROTATING, STEP, STEPS, TUNED, TYPES

NAME = "llama4"
KEYS = {
    "interleave_moe_layer_step": STEP, "feed_forward_length": "intermediate_size_mlp",
    "expert_feed_forward_length": "intermediate_size",
}  # fmt: skip
RENAMED = {"num_experts": "num_local_experts"}
RELEASED = {CHUNK: 8192, TUNED: True, GROWTH: 0.1, STEPS: 8192}
WITHOUT_NORMS = 128  # experts


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that llama.cpp has of itself."""
    layers = range(config.get("num_hidden_layers", 0))
    rotating = [int((i + 1) % 4 != 0) for i in layers]
    types = [TYPES["local" if each else "global"] for each in rotating]
    norms = config.get("num_local_experts") != WITHOUT_NORMS
    return RELEASED | {ROTATING: rotating, "layer_types": types, "use_qk_norm": norms}


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for what llama.cpp does not compute."""
    for key, value in _own(config).items():
        if config[key] != value:
            raise UserError(
                f"{where}: llama.cpp's {NAME} has {key} = {value!r}, not {config[key]!r}; export "
                "to a Hugging Face folder instead"
            )
    if STEP not in config:
        raise UserError(
            f"{where}: llama.cpp's {NAME} has experts in the last of every so many layers, and "
            "model.dense_layers are others; export to a Hugging Face folder instead"
        )
    return {GATING: SIGMOID}


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that the metadata leave out."""
    return _own(config)
