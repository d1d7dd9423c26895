"""Rows of tensors in GGUF's order.

q, k         halves of a head's rotated dims (x0, x1 ... y0, y1 ...) as pairs (x0, y0, x1, y1 ...)
fused q k v  of all heads by part, where Hugging Face has all three of a head
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmwright.formats import gguf_hybrid
from lmwright.formats.gguf_archs import Arch
from lmwright.formats.gguf_rope import rotated_dims


def in_order(
    name: str, array: np.ndarray, config: Mapping[str, Any], arch: Arch, *, into: bool
) -> np.ndarray:
    """A tensor of this Hugging Face name with its rows in llama.cpp's order, or back in that of
    Hugging Face."""
    heads = rotated_heads(name, config) if arch.rotated else None
    if heads is not None:
        return pairs(array, heads, rotated_dims(config) if arch.partial else None, into=into)
    if arch.by_part and ".query_key_value." in name:
        return by_part(array, int(config["num_attention_heads"]), into=into)
    return gguf_hybrid.turned(name, array, config, into=into)


def pairs(
    array: np.ndarray, num_heads: int, rotated: int | None = None, *, into: bool
) -> np.ndarray:
    """Rows of q or k [heads * head_dim, ...] from halves into pairs, or back; of each head the
    first `rotated`, or all."""
    heads = array.reshape(num_heads, -1, *array.shape[1:])
    first, rest = heads[:, :rotated], heads[:, heads.shape[1] if rotated is None else rotated :]
    half = first.shape[1] // 2
    shape = (num_heads, 2, half) if into else (num_heads, half, 2)
    first = first.reshape(*shape, *array.shape[1:]).swapaxes(1, 2).reshape(first.shape)
    return np.concatenate([first, rest], axis=1).reshape(array.shape)


def by_part(array: np.ndarray, num_heads: int, *, into: bool) -> np.ndarray:
    """Rows of a fused q, k and v [heads * 3 * head_dim, ...] from an order by head into one by
    part, or back."""
    first = (num_heads, 3) if into else (3, num_heads)
    shape = (*first, array.shape[0] // num_heads // 3, *array.shape[1:])
    return array.reshape(shape).swapaxes(0, 1).reshape(array.shape)


def rotated_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Number of heads in the rows of a tensor if it is a q or k projection."""
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None
