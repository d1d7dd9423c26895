"""Layers that predict a further token, in GGUF behind the others; they are not read."""

from collections.abc import Mapping
from typing import Any

FURTHER, LAYERS = "nextn_predict_layers", "block_count"


def without(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The metadata of architecture `name` as those of a model without such layers."""
    further, layers = meta.get(f"{name}.{FURTHER}") or 0, meta.get(f"{name}.{LAYERS}") or 0
    if not further:
        return dict(meta)
    kept = int(layers) - int(further)
    of_layers = lambda each: isinstance(each, list) and len(each) == layers  # noqa: E731
    found = {key: each[:kept] if of_layers(each) else each for key, each in meta.items()}
    return found | {f"{name}.{LAYERS}": kept}


def is_of_one(tensor: str, num_layers: int) -> bool:
    """True for a tensor, by GGUF's name, of a layer behind the model's."""
    parts = tensor.split(".")
    return parts[0] == "blk" and int(parts[1]) >= num_layers
