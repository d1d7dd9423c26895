"""Blocks of integers as GGUF files hold them, from rows of codes and the numbers beside them.

    Q4_0, IQ4_NL   32 codes of 4 bits; a float16 scale
    Q4_K, Q5_K     256 codes of 4 or 5 bits; 8 scales and 8 offsets of 6 bits, and a float16 unit
                   of each: a code of group g stands for unit * scale[g] * code - unit' * offset[g]
    Q6_K           256 codes of 6 bits; 16 scales of 8 bits, and their float16 unit
    Q4_K_M, Q5_K_M a file of these: most matrices as Q4_K or Q5_K, those that suffer most as Q6_K

https://github.com/ggml-org/llama.cpp, ggml-common.h and ggml-quants.c
"""

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np

from lmwright.data.tokens.gguf_header import gguf_package
from lmwright.formats.safetensors import Tensors, described

# https://github.com/ggml-org/llama.cpp, kvalues_iq4nl
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Block(NamedTuple):
    """A type of blocks: how many codes one has, and what makes its bytes."""

    codes: int
    pack: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """uint8 [..., bytes] of codes [..., `codes`] and the numbers beside them [..., any]."""
    file_type: str
    """Name of a file of such blocks, as the gguf package has it."""

    def rows(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """float32 [out, any] of codes [out, in], in which a block stands beside its `numbers`
        [out, blocks, any], or scale [out, blocks]: it moves with them."""
        numbers = numbers if numbers.ndim == 3 else numbers[..., None]
        blocks = codes.reshape(len(codes), -1, self.codes)
        return np.concatenate([blocks, numbers], axis=-1, dtype=np.float32).reshape(len(codes), -1)

    def packed(self, rows: np.ndarray, width: int) -> np.ndarray:
        """uint8 [out, bytes] of such rows, of `width` codes each."""
        blocks = rows.reshape(len(rows), width // self.codes, -1)
        return self.pack(blocks[..., : self.codes], blocks[..., self.codes :]).reshape(
            len(rows), -1
        )


def _q4_0(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.concatenate([_half(numbers), _nibbles(_bytes(codes + 8))], axis=-1)


def _iq4_nl(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    places = _bytes(np.searchsorted(IQ4_NL, codes))
    return np.concatenate([_half(numbers), _nibbles(places)], axis=-1)


def _q4_k(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    groups = _bytes(codes).reshape(*codes.shape[:-1], 4, 64)
    return np.concatenate([_beside(numbers), _joined(_nibbles(groups))], axis=-1)


def _q5_k(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    groups = _bytes(codes).reshape(*codes.shape[:-1], 8, 32)
    high = np.bitwise_or.reduce((groups >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=-2)
    low = (groups & 15).reshape(*codes.shape[:-1], 4, 64)
    return np.concatenate([_beside(numbers), high, _joined(_nibbles(low))], axis=-1)


def _q6_k(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    halves = _bytes(codes + 32).reshape(*codes.shape[:-1], 2, 128)
    quarters = (halves >> 4).reshape(*codes.shape[:-1], 2, 4, 32)
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(quarters << shifts, axis=-2)
    scales = numbers[..., :16].astype(np.int8).view(np.uint8)
    parts = (_joined(_nibbles(halves & 15)), _joined(high), scales, _half(numbers[..., 16:]))
    return np.concatenate(parts, axis=-1)


def _beside(numbers: np.ndarray) -> np.ndarray:
    """uint8 [..., 16] of 8 scales, 8 offsets and the units of both: the units, then 6 bits of each,
    of which those of the last four lie in two places."""
    integers = _bytes(numbers[..., :16])
    scale, offset = integers[..., :8], integers[..., 8:]
    first, second = (a[..., :4] | a[..., 4:] >> 4 << 6 for a in (scale, offset))
    third = scale[..., 4:] & 15 | (offset[..., 4:] & 15) << 4
    units = (_half(numbers[..., n : n + 1]) for n in (16, 17))
    return np.concatenate([*units, first, second, third], axis=-1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Two halves of the last axis as the low and the high bits of bytes."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4


def _joined(a: np.ndarray) -> np.ndarray:
    return a.reshape(*a.shape[:-2], -1)


def _bytes(a: np.ndarray) -> np.ndarray:
    return a.astype(np.uint8)


def _half(a: np.ndarray) -> np.ndarray:
    """uint8 [..., 2] of a number [..., 1] as float16."""
    return np.ascontiguousarray(a.astype(np.float16)).view(np.uint8)


BLOCKS = {
    "Q4_0": Block(32, _q4_0, "MOSTLY_Q4_0"),
    "IQ4_NL": Block(32, _iq4_nl, "MOSTLY_IQ4_NL"),
    "Q4_K": Block(256, _q4_k, "MOSTLY_Q4_K_S"),
    "Q5_K": Block(256, _q5_k, "MOSTLY_Q5_K_S"),
    "Q6_K": Block(256, _q6_k, "MOSTLY_Q6_K"),
}
"""Types of GGUF in blocks of integers that are rounded before a file is written."""


class Mix(NamedTuple):
    """Types of blocks in one file."""

    usual: str
    fused: str
    """Of q, k and v in one matrix."""
    larger: str
    """Of v, and of mlps' outputs, in some layers."""
    file_type: str


MIXES = {
    "Q4_K_M": Mix("Q4_K", "Q5_K", "Q6_K", "MOSTLY_Q4_K_M"),
    "Q5_K_M": Mix("Q5_K", "Q6_K", "Q6_K", "MOSTLY_Q5_K_M"),
}
"""Files of several types of blocks, by the name that llama.cpp gives them."""


def block_in(kind: str, name: str, num_layers: int) -> str:
    """Type of the matrix of a GGUF name in a file of a type: that type, or of a mix the one that
    llama.cpp's quantizer takes for most models (llama-quant.cpp, llama_tensor_get_type)."""
    if kind not in MIXES:
        return kind
    mix = MIXES[kind]
    found = re.match(r"blk\.(\d+)\.(attn_qkv|attn_v|ffn_down\w*)\.", name)
    if found is None:
        return mix.usual
    if found[2] == "attn_qkv":
        return mix.fused
    layer, eighth = int(found[1]), num_layers // 8
    more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return mix.larger if more else mix.usual


def type_of_file(main: str, kinds: AbstractSet[str]) -> str:
    """llama.cpp's name for a file of these types of tensors, most of them `main`."""
    mixes = (mix for mix in MIXES.values() if {mix.usual, mix.larger} <= kinds)
    blocks = next(mixes, None) or BLOCKS.get(main)
    return blocks.file_type if blocks else f"MOSTLY_{main}"


def of_blocks(kind: str) -> tuple[str, ...]:
    """Types of the blocks that a file of a type has; none for a type without blocks."""
    if kind in MIXES:
        return tuple(dict.fromkeys(MIXES[kind][:3]))
    return (kind,) if kind in BLOCKS else ()


class EightBits(Tensors):
    """Tensors some of which, `rounded`, have the values that a file holds of them as Q8_0."""

    computed = True

    def __init__(self, stored: Mapping[str, Any], rounded: AbstractSet[str]):
        self._stored, self._names = stored, rounded
        super().__init__(set(stored))

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor."""
        kind, shape = described(self._stored, name)
        return ("float32" if name in self._names else kind), shape

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._stored[name]
        if name not in self._names:
            return array
        gguf = gguf_package()
        kind = gguf.GGMLQuantizationType.Q8_0
        return np.asarray(gguf.dequantize(gguf.quantize(array.astype(np.float32), kind), kind))
