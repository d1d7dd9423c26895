"""Qwen3.5 and Qwen3-Next in GGUF: where their files differ from the Hugging Face form.

    A_log                  -e^A_log, the rate itself
    norms                  1 + scale, but for those of memories, whose scale is stored
    conv1d [C, 1, K]       [C, K]
    heads of values        one of each key after the other, where Hugging Face has all of a key;
                           in Qwen3-Next as there
    in_proj_qkvz           of Qwen3-Next: queries, keys and values of all heads; gates of all

and in the metadata, where full attention comes every so many layers. As llama.cpp's
convert_hf_to_gguf.py writes them.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.formats import gguf_ernie, gguf_mamba
from lmwright.formats.gguf_apart import Cut
from lmwright.formats.gguf_rope import rotated_dims
from lmwright.models.hf.qwen3_5 import TYPES
from lmwright.models.hf.window import kinds_said
from lmwright.nn.delta_rule import EPS

LINEAR = ".linear_attn."
OWN_NORM = f"{LINEAR}norm.weight"
FILTERS = (
    f"{LINEAR}conv1d.weight",
    ".conv.conv.weight",
    ".mamba.conv1d.weight",
    ".mixer.conv1d.weight",
)  # of others, too
NEXT = "Qwen3NextForCausalLM"
KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
MOE_KEYS = KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
INNER, SECTIONS = "ssm.inner_size", "rope.dimension_sections"


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for layers in another order, or another
    epsilon of norms than the released one."""
    said = config["layer_types"]
    every = said.index(TYPES["full"]) + 1 if TYPES["full"] in said else 0
    usual = kinds_said({}, TYPES, every or 1, len(said), where)
    if not every or said != [TYPES[kind] for kind in usual]:
        raise UserError(
            f"{where}: model.mixer_pattern: llama.cpp takes full attention in the last of every so "
            "many layers, as in released models; export to a Hugging Face folder instead"
        )
    if not math.isclose(config["rms_norm_eps"], EPS, rel_tol=1e-3):
        raise UserError(
            f"{where}: llama.cpp norms queries and keys of linear layers with model.norm_eps = "
            f"{config['rms_norm_eps']:g} instead of {EPS:g}; export to a Hugging Face folder"
        )
    meta = {
        "full_attention_interval": every,
        INNER: config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }
    if config["architectures"][0] != NEXT:
        # frequencies of positions in time, height and width by turns; in a text they are the same
        frequencies = rotated_dims(config) // 2
        meta[SECTIONS] = [(frequencies + more) // 3 for more in (2, 1, 0)] + [0]
    return meta


def config_of(meta: Mapping[str, Any], config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of config.json that follow from several of the metadata."""
    inner, heads = meta.get(f"{name}.{INNER}"), config.get("linear_num_value_heads")
    return {"linear_value_head_dim": inner // heads} if inner and heads else {}


def place_of(name: str) -> str:
    """The name that the gguf package's table knows."""
    return name.replace(".mixer.dt_bias", ".mixer.dt.bias").replace(".dt_bias", ".dt_proj.bias")


def is_filter(name: str) -> bool:
    """True for the filters of a convolution."""
    return name.endswith(FILTERS)


def shape_in_file(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape in GGUF of a tensor of this one in Hugging Face's form."""
    if is_filter(name):
        return shape[0], shape[-1]
    if name.endswith(gguf_ernie.BIAS):
        return shape[-1:]
    return gguf_mamba.shape_in_file(name, shape, config)


def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in Hugging Face's form of a tensor of this one in GGUF."""
    if is_filter(name):
        return shape[0], 1, shape[-1]
    if name.endswith(gguf_ernie.BIAS):
        return 1, shape[-1]
    return gguf_mamba.shape_of(name, shape)


def turned(name: str, array: np.ndarray, config: Mapping[str, Any], *, into: bool) -> np.ndarray:
    """A tensor of a layer without attention in GGUF's form, or back in that of Hugging Face."""
    if is_filter(name):
        array = array.reshape(len(array), -1)
    if name.endswith(gguf_ernie.BIAS):
        return array.reshape(-1) if into else array.reshape(1, -1)
    if name.endswith(".A_log"):  # in float64: each way rounds once, alike on every CPU
        wide = array.astype(np.float64)
        array = (-np.exp(wide) if into else np.log(-wide)).astype(np.float32)
    if LINEAR in name:
        array = _heads_turned(name, array, config, into)
    if into:
        return array.reshape(gguf_mamba.shape_in_file(name, array.shape, config))
    return array.reshape(shape_of(name, array.shape))


def in_order(name: str, row: int, config: Mapping[str, Any]) -> int:
    """Inputs of a row of this many that stay neighbors in GGUF's form: blocks cannot be larger."""
    if not (LINEAR in name and name.endswith("out_proj.weight")):
        return row
    return row // int(config["linear_num_value_heads"]) if _turns(config) else row


def _turns(config: Mapping[str, Any]) -> bool:
    """True where the heads of values have another order."""
    keys, values = (config[f"linear_num_{of}_heads"] for of in ("key", "value"))
    return keys != values and config["architectures"][0] != NEXT


def _heads_turned(
    name: str, array: np.ndarray, config: Mapping[str, Any], into: bool
) -> np.ndarray:
    """The heads of values in the other order."""
    keys, values = (config[f"linear_num_{of}_heads"] for of in ("key", "value"))
    if not _turns(config) or name.endswith(OWN_NORM):
        return array
    order = (keys, values // keys) if into else (values // keys, keys)

    def turn(rows: np.ndarray) -> np.ndarray:
        rest = (values, len(rows) // values, *rows.shape[1:])
        apart = rows.reshape(rest).reshape(*order, *rest[1:])
        return apart.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(turn(array.T).T)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):  # queries and keys come first
        first = 2 * keys * config["linear_key_head_dim"]  # also of rows of filters
        return np.concatenate([array[:first], turn(array[first:])])
    return turn(array)


def cut(config: Mapping[str, Any]) -> Cut:
    """`in_proj_qkvz` of Qwen3-Next, whose rows are those of one head of keys after the other."""
    keys, values = (config[f"linear_num_{of}_heads"] for of in ("key", "value"))
    size, width = config["linear_key_head_dim"], config["hidden_size"]
    of_key = values // keys * size
    sizes = (size, size, of_key, of_key)  # rows of a head of keys

    def split(whole: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = np.split(whole.reshape(keys, sum(sizes), width), np.cumsum(sizes[:-1]), axis=1)
        q, k, v, gate = (part.reshape(-1, width) for part in parts)
        return np.concatenate([q, k, v]), gate

    def join(qkv: np.ndarray, gate: np.ndarray) -> np.ndarray:
        ends = np.cumsum([keys * rows for rows in sizes[:2]])
        parts = (part.reshape(keys, -1, width) for part in (*np.split(qkv, ends), gate))
        return np.concatenate([*parts], axis=1).reshape(-1, width)

    shapes = ((2 * keys * size + keys * of_key, width), (keys * of_key, width))
    return Cut("in_proj_qkvz.weight", ("in_proj_qkv.weight", "in_proj_z.weight"), shapes, split,
               join)  # fmt: skip
