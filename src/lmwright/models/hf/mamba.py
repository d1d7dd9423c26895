"""Layers with Mamba-2 in Hugging Face, as the families that have some say them."""

import math
from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.pairs import Json, refuse_number

CONVS = ("layers.conv",)
LIMITS = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # none, as transformers writes it


def mamba_weights(mixer: str) -> dict[str, str]:
    """Names of the weights of a mixer with this name."""
    names = {
        "mamba_in": "in_proj.weight", "conv": "conv1d.weight", "conv_bias": "conv1d.bias",
        "a_log": "A_log", "dt_bias": "dt_bias", "skip": "D", "memory_norm": "norm.weight",
        "mamba_out": "out_proj.weight",
    }  # fmt: skip
    return {f"layers.{ours}": f"{mixer}.{theirs}" for ours, theirs in names.items()}


def head_width(config: Json, heads: int, inner: Any, called: str, where: str) -> Json:
    """The width of a head. Raises UserError where all of them together are not `inner` wide, which
    config.json says by what is `called` so."""
    width = config["mamba_d_head"]
    width = inner // heads if width == "auto" else width
    refuse_number("mamba_d_head", width, where, whole=True)
    if heads * width != inner:
        raise UserError(
            f"{where}: mamba_n_heads = {heads} times mamba_d_head = {width} is not {called}"
            f"{inner}; correct one of them"
        )
    return {"mamba_head_dim": width}


def read_limits(config: Json, _: Json, where: str) -> Json:
    """No field. Raises UserError for limits of steps, which are not computed."""
    said = config.get("time_step_limit") or LIMITS[0]
    if list(said) not in LIMITS:
        raise UserError(
            f"{where}: time_step_limit = {said} is not supported; released models have none"
        )
    return {}
