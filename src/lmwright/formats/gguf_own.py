"""Keys of GGUF that one architecture alone has, for a config.json."""

from collections.abc import Mapping
from typing import Any

from lmwright.formats import (
    gguf_afmoe,
    gguf_cohere,
    gguf_ernie,
    gguf_exaone4,
    gguf_layer_norms,
    gguf_llama4,
    gguf_mamba2,
    gguf_mellum,
    gguf_mistral3,
    gguf_nemotron,
)

OWN_METADATA = {
    gguf_exaone4.MOE: gguf_exaone4.moe_metadata, gguf_mellum.NAME: gguf_mellum.metadata,
    gguf_ernie.NAME: gguf_ernie.metadata, gguf_afmoe.NAME: gguf_afmoe.metadata,
    gguf_llama4.NAME: gguf_llama4.metadata, gguf_mamba2.NAME: gguf_mamba2.metadata,
}  # fmt: skip
"""Functions that give an architecture's own keys for a config.json."""


def of_one(
    config: Mapping[str, Any], rope: Mapping[str, Any], name: str, where: str
) -> dict[str, Any]:
    """Keys of one architecture alone. Raises UserError for what llama.cpp does not compute."""
    if name == gguf_exaone4.NAME:
        gguf_exaone4.refuse(config, where)
    if name in gguf_nemotron.NAMES:
        return gguf_nemotron.metadata(config, where)
    if name in gguf_cohere.NAMES:
        return gguf_cohere.metadata(config, name, where)
    if name in gguf_layer_norms.NAMES:
        return gguf_layer_norms.metadata(name)
    if (own := OWN_METADATA.get(name)) is not None:
        return own(config, where)
    return gguf_mistral3.metadata(rope, where) if name == gguf_mistral3.NAME else {}
