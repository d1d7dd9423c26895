"""Ministral 3's rotations in GGUF, as llama.cpp's convert_hf_to_gguf.py writes them.

rope.scaling.yarn_log_multiplier    mscale_all_dim, beside an mscale of 1
attention.temperature_scale         the weight by which queries grow
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_deepseek import MULTIPLIER, SCALE
from lmwright.formats.gguf_rope import decimal
from lmwright.models.hf.ministral3 import GROWTH

NAME = "mistral3"


def metadata(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name for these rotations of a config.json, none for those of
    other models. Raises UserError for what llama.cpp does not compute."""
    if GROWTH not in rope:
        return {}
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    meta = {SCALE: float(rope[GROWTH])}
    if mscale is None and of_all is None:
        return meta
    if mscale != of_all and mscale != 1.0:
        raise UserError(
            f"{where}: llama.cpp computes YaRN here with model.rope_scaling.mscale as 1 or as "
            "mscale_all_dim; export to a Hugging Face folder instead"
        )
    return meta | {MULTIPLIER: 1.0 if mscale == of_all else float(of_all)}


def plain(meta: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata as other architectures have them for rotations, and what this one adds to
    YaRN."""
    own = f"{name}.{MULTIPLIER}"
    added: dict[str, Any] = {GROWTH: decimal(meta.get(f"{name}.{SCALE}", 0.0))}
    if multiplier := decimal(meta.get(own, 0.0)):
        added |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {key: value for key, value in meta.items() if key != own}, added
