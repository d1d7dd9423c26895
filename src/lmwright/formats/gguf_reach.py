"""Which layers look through a window, one by one, in GGUF."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_gemma4 import PATTERN
from lmwright.models.hf.rope import SIDES


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key below the architecture's name, by a config.json's `layer_types`."""
    return {PATTERN: [kind == SIDES[1] for kind in config["layer_types"]]}


def types_of_every(every: int, num_layers: int) -> list[str]:
    """`layer_types` of which the last of so many layers is global, or none for 0."""
    return [SIDES[every == 0 or (i + 1) % every > 0] for i in range(num_layers)]


def layer_types(
    meta: Mapping[str, Any], num_layers: int, name: str, where: str, usual: int | None = None
) -> list[str]:
    """`layer_types` of a config.json. Where the metadata are silent, the last of each `usual`
    layers is global; None raises UserError there."""
    local = meta.get(f"{name}.{PATTERN}", usual)
    if isinstance(local, int) and local > 0:
        return types_of_every(local, num_layers)
    if not isinstance(local, list) or len(local) != num_layers:
        raise UserError(
            f"{where}: lacks {name}.{PATTERN} of {num_layers} layers; download it again"
        )
    return [SIDES[bool(each)] for each in local]
