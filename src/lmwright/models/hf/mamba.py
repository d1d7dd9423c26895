"""Layers with Mamba-2 in Hugging Face, as the families that have some say them."""

import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from lmwright.config.fields import default_of
from lmwright.errors import UserError
from lmwright.models.hf.pairs import Derived, Json, refuse_number
from lmwright.models.hf.table import WEIGHTS
from lmwright.models.mamba import MAMBA, Mamba

LAYER = "model.layers.{i}"
SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "conv_tokens")
"""Fields of layers with Mamba-2."""
OF_MIXER = {
    "mamba_num_heads": "mamba_n_heads", "mamba_num_groups": "mamba_n_groups",
    "mamba_state_dim": "mamba_d_state", "conv_tokens": "mamba_d_conv",
}  # fmt: skip
"""Keys of such a layer."""
WEIGHTS_BESIDE = {
    name: there.replace(".mlp.", ".feed_forward.") for name, there in WEIGHTS.items()
} | {"norm": "model.final_layernorm.weight", "layers.mlp_norm": f"{LAYER}.pre_ff_layernorm.weight"}
"""Names of the weights beside the mixers, as Falcon-H1 and Bamba have them."""
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
    refuse_widths({"mamba_n_heads": heads, "mamba_d_head": width}, inner, called, where)
    return {"mamba_head_dim": width}


def refuse_widths(heads: Mapping[str, int], inner: Any, called: str, where: str) -> None:
    """Raises UserError where the number and the width of heads, by their keys in config.json, do
    not make `inner`, which it says by what is `called` so."""
    if math.prod(heads.values()) != inner:
        said = " times ".join(f"{key} = {value}" for key, value in heads.items())
        raise UserError(f"{where}: {said} is not {called}{inner}; correct one of them")


def _read_heads(config: Json, fields: Json, where: str) -> Json:
    if MAMBA not in fields["mixer_pattern"]:  # what config.json says has no effect
        return {
            each.name: default_of(each) for each in dataclass_fields(Mamba) if each.name in SIZES
        }
    heads, inner = fields["mamba_num_heads"], config["mamba_expand"] * fields["embed_dim"]
    return head_width(config, heads, inner, "mamba_expand times hidden_size, ", where)


def expansion(model: Any, architecture: str) -> int:
    """Width of all heads as a multiple of the model's. Raises UserError where it is none."""
    if model.inner_dim % model.embed_dim:
        raise UserError(
            f"model.mamba_num_heads: {model.mamba_num_heads} heads of {model.mamba_head_dim} are "
            f"not a multiple of model.embed_dim = {model.embed_dim}, as in {architecture}; change "
            "them to export"
        )
    return int(model.inner_dim // model.embed_dim)


def _write_heads(model: Any, architecture: str, _: str) -> Json:
    if MAMBA not in model.kinds:  # such as transformers takes
        heads = math.gcd(2 * model.embed_dim, 128)
        width = 2 * model.embed_dim // heads
        return {"mamba_n_heads": heads, "mamba_d_head": width, "mamba_expand": 2}
    return {"mamba_d_head": model.mamba_head_dim, "mamba_expand": expansion(model, architecture)}


HEADS = Derived(_read_heads, _write_heads)
"""Heads whose width may be said by a factor on that of the model."""


def read_limits(config: Json, _: Json, where: str) -> Json:
    """No field. Raises UserError for limits of steps, which are not computed."""
    said = config.get("time_step_limit") or LIMITS[0]
    if list(said) not in LIMITS:
        raise UserError(
            f"{where}: time_step_limit = {said} is not supported; released models have none"
        )
    return {}
