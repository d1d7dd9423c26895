"""Ternary weights in files: four to a byte as transformers packs them, and as values.

    codes [R, in] --> uint8 [R / 4, in]: rows i R/4 ... (i + 1) R/4 at bits 2i, plus one
    value = code * weight_scale

Files hold no trained floats then. What is read back are floats that are rounded to the very same
codes and scale: the mean magnitude of `code * scale / share of non-zeros` is the scale.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import walk
from lmwright.core.rounding import ternary
from lmwright.errors import UserError
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.safetensors import Tensors, described

PER_BYTE = 4
SCALE = "_scale"  # behind the name of a packed weight


def has_ternary(model: HfModel) -> bool:
    """True for a model that computes with ternary weights."""
    return any(param.ternary for _, param in walk(model.spec()))


def codes_of(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes of trained floats [out, in], and their scale, float32 [1]."""
    codes, scale = ternary(jnp.asarray(array), array.ndim)
    return np.asarray(codes), np.asarray(scale, np.float32).reshape(1)


def floats_of(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 weights for which `codes_of` gives these codes and this scale."""
    share = np.count_nonzero(codes) / codes.size
    return codes.astype(np.float32) * np.float32(scale.item() / share if share else 0.0)


def codes_of_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 codes of values -s, 0 and s, and s, float32 [1]."""
    return np.sign(values), np.abs(values).max(initial=0).astype(np.float32).reshape(1)


def floats_of_values(values: np.ndarray, scale: np.ndarray | None, name: str) -> np.ndarray:
    """float32 weights that are rounded to these values, -s, 0 and s, times the scale. Raises
    UserError for values that are not ternary."""
    values = values.astype(np.float32)
    codes, largest = codes_of_values(values)
    if not np.array_equal(values, codes * largest):
        raise UserError(
            f"{name}: has other values than -s, 0 and s; the file was not made from ternary "
            "weights, or by a converter that rounds them again"
        )
    return floats_of(codes, largest if scale is None else largest * scale.astype(np.float32))


def pack(codes: np.ndarray, name: str = "weight") -> np.ndarray:
    """uint8 [out / 4, in] of codes [out, in]. Raises UserError where rows do not divide."""
    rows = codes.shape[0]
    if rows % PER_BYTE:
        raise UserError(
            f"{name}: has {rows} rows, which are not packed {PER_BYTE} to a byte; export floats"
        )
    parts = (codes + 1).astype(np.uint8).reshape(PER_BYTE, rows // PER_BYTE, -1)
    return np.bitwise_or.reduce([part << 2 * i for i, part in enumerate(parts)])


def unpack(packed: np.ndarray, name: str = "weight") -> np.ndarray:
    """int8 codes [out, in]. Raises UserError for bytes that hold none."""
    parts = [(packed >> 2 * i) & 3 for i in range(PER_BYTE)]
    codes = np.concatenate(parts).astype(np.int8) - 1
    if codes.max(initial=0) > 1:
        raise UserError(f"{name}: holds other values than -1, 0 and 1; download it again")
    return codes


class PackedTernary(Tensors):
    """The tensors of a folder of packed values, as floats that are rounded to them."""

    def __init__(self, stored: Mapping[str, np.ndarray]):
        self._stored = stored
        self._packed = {name for name in stored if f"{name}{SCALE}" in stored}
        scales = {f"{name}{SCALE}" for name in self._packed}
        super().__init__([name for name in stored if name not in scales])

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of the floats."""
        dtype, shape = described(self._stored, name)
        if name not in self._packed:
            return dtype, shape
        if dtype != "uint8" or len(shape) != 2:
            raise UserError(f"{name}: is {dtype} {list(shape)} beside a scale, not packed values")
        return "float32", (shape[0] * PER_BYTE, shape[1])

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._stored[name]
        if name not in self._packed:
            return array
        scale = np.asarray(self._stored[f"{name}{SCALE}"]).astype(np.float32)
        if scale.size != 1 or not np.isfinite(scale).all() or scale.item() <= 0:
            raise UserError(f"{name}{SCALE}: is not a positive number; download the folder again")
        return floats_of(unpack(array, name), scale)


class TernaryValues(Tensors):
    """The tensors of a model with the values that its ternary weights compute with, for files
    whose readers do not round."""

    def __init__(self, model: HfModel, tensors: Mapping[str, Any]):
        self._tensors = tensors
        self._slots: dict[str, Slot] = {slot.name: slot for slot in slots(model)}
        super().__init__(self._slots)

    def __getitem__(self, name: str) -> np.ndarray:
        if not self._slots[name].param.ternary:
            return self._tensors[name]
        codes, scale = codes_of(self._tensors[name])
        return codes.astype(np.float32) * scale
