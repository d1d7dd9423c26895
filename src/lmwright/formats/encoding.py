"""Encodings: how a Hugging Face folder holds the weights: which tensors, and what config.json says
of them.

fp32, bf16, fp16   each weight as a tensor of that dtype
ternary            ternary weights packed, the rest as it is stored
ternary-bf16       the same of weights that are rounded to bf16 before
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.errors import UserError
from lmwright.formats.compressed import (
    BITS,
    ENDINGS,
    group_of,
    left_as_floats,
    pack_integers,
    packed_width,
    refuse_grid,
    scheme,
)
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.inputs_first import inputs_first
from lmwright.formats.safetensors import DTYPES, described
from lmwright.formats.stacked_experts import in_files, stacked, stacked_sizes
from lmwright.formats.ternary import PER_BYTE, SCALE, codes_of, has_ternary, pack
from lmwright.models.counts import is_layer_matrix
from lmwright.models.hf.bitnet import QUANTIZATION, how_quantized

PACKED = ("ternary", "ternary-bf16")
FOLDER_TYPES = (*DTYPES, *PACKED, *BITS)


@dataclass(frozen=True)
class Encoding:
    """Weights, each as a tensor of one dtype."""

    name: str
    rest: str
    """Dtype of what is stored as floats."""

    @property
    def config(self) -> dict[str, Any]:
        """Keys of config.json beside those of the model."""
        return {}

    def sizes(self, model: HfModel) -> list[tuple[str, int]]:
        """(name, bytes) of each tensor."""
        return [size for slot in slots(model) for size in self._sizes(slot)]

    def _sizes(self, slot: Slot) -> list[tuple[str, int]]:
        return [(slot.name, slot.size * self._dtype(slot).itemsize)]

    def _dtype(self, slot: Slot) -> np.dtype:
        """Dtype of a tensor of floats: biases that balance experts are float32, as transformers
        keeps them, since rounding would send tokens to other experts."""
        return DTYPES["fp32" if is_balance(slot) else self.rest]

    def tensors(
        self, model: HfModel, tensors: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, in the order of `sizes`. Raises UserError where a value is not a
        finite number."""
        for slot in slots(model):
            yield slot.name, cast_tensor(slot.name, tensors[slot.name], self._dtype(slot))


class StackedExperts(Encoding):
    """Weights as tensors of one dtype, all experts of a layer in a few."""

    def sizes(self, model: HfModel) -> list[tuple[str, int]]:
        """(name, bytes) of each tensor."""
        sizes = stacked_sizes(super().sizes(model))
        return [(in_files(name, model.hf.stacked_names), size) for name, size in sizes]

    def tensors(
        self, model: HfModel, tensors: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, in the order of `sizes`."""
        order = model.hf.stacked_experts or "halves"
        for name, array in stacked(super().tensors(model, tensors), order=order):
            yield in_files(name, model.hf.stacked_names), array


class InputsFirst(Encoding):
    """Weights as tensors of one dtype, matrices as [in, out]."""

    def tensors(
        self, model: HfModel, tensors: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, in the order of `sizes`."""
        return inputs_first(super().tensors(model, tensors), model.hf.inputs_first)


class Ternary(Encoding):
    """Ternary weights as packed codes with a scale each."""

    @property
    def config(self) -> dict[str, Any]:
        """Says that nothing is left to round."""
        return {QUANTIZATION: how_quantized("offline")}

    def _sizes(self, slot: Slot) -> list[tuple[str, int]]:
        if not slot.param.ternary:
            return super()._sizes(slot)
        return [(slot.name, slot.size // PER_BYTE), (f"{slot.name}{SCALE}", 4)]

    def tensors(
        self, model: HfModel, tensors: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, in the order of `sizes`."""
        for slot in slots(model):
            array = cast_tensor(slot.name, tensors[slot.name], DTYPES[self.rest])
            if slot.param.ternary:
                codes, scale = codes_of(array)
                yield slot.name, pack(codes, slot.name)
                yield f"{slot.name}{SCALE}", scale
            else:
                yield slot.name, array


@dataclass(frozen=True)
class Compressed(Encoding):
    """Integers, as compressed-tensors packs them; the rest as floats."""

    group: int
    floats: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The scheme, and the linear layers that it leaves as floats."""
        return {QUANTIZATION: scheme(self.name, self.group, self.floats)}

    def _sizes(self, slot: Slot) -> list[tuple[str, int]]:
        if not is_layer_matrix(slot.param):
            return super()._sizes(slot)
        groups = slot.shape[1] // self.group if self.group else 1
        sizes = (slot.shape[0] * packed_width(slot, self.name) * 4, slot.shape[0] * groups * 4, 16)
        return [(f"{slot.name}_{end}", size) for end, size in zip(ENDINGS, sizes, strict=True)]

    def tensors(
        self, model: HfModel, tensors: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, in the order of `sizes`."""
        for slot in slots(model):
            found = tensors.codes(slot.name) if is_layer_matrix(slot.param) else None  # type: ignore[attr-defined]
            if found is None:
                yield slot.name, cast_tensor(slot.name, tensors[slot.name], DTYPES[self.rest])
                continue
            codes, scale = found
            shape = np.asarray(codes.shape, np.int64)
            parts = (pack_integers(codes, BITS[self.name]), scale.astype(np.float32), shape)
            for end, array in zip(ENDINGS, parts, strict=True):
                yield f"{slot.name}_{end}", array


def refuse_packed(dtype: str, model: HfModel, field: str, cure: str) -> None:
    """Raises UserError for a model whose folder cannot hold packed weights; `field` asks for
    that."""
    if model.hf.inputs_first:
        why = "whose matrices are not linear layers in transformers"
    elif model.hf.stacked_experts:
        why = "whose files hold all experts of a layer in one tensor"
    else:
        return
    raise UserError(f"{field}: {dtype!r} is not written for {model.hf.name}, {why}; {cure}")


def encoding_of(dtype: str, model: HfModel, tensors: Mapping[str, Any]) -> Encoding:
    """The encoding of a name. Raises UserError for an unknown one, or one that is for other
    models."""
    refuse_dtype(dtype, FOLDER_TYPES)
    if dtype in DTYPES:
        if model.hf.inputs_first:
            return InputsFirst(dtype, dtype)
        return (StackedExperts if model.hf.stacked_experts else Encoding)(dtype, dtype)
    refuse_packed(dtype, model, "dtype", f"use one of {', '.join(DTYPES)}")
    if dtype in BITS:
        refuse_grid(dtype, tensors)
        group = group_of(dtype, model, tensors)
        rest = getattr(tensors, "rest", "fp32")
        return Compressed(dtype, rest, group, tuple(left_as_floats(model)))
    if not has_ternary(model):
        raise UserError(
            f"dtype: {dtype!r} packs ternary weights, and a {model.kind!r} model has none; use one "
            f"of {', '.join(DTYPES)}"
        )
    return Ternary(dtype, "bf16" if dtype == "ternary-bf16" else stored_dtype(model, tensors))


def is_balance(slot: Slot) -> bool:
    """True for biases that balance experts."""
    return slot.param.balance_rate is not None


def stored_dtype(model: HfModel, tensors: Mapping[str, Any]) -> str:
    """fp32, bf16 or fp16: the narrowest that holds all tensors exactly, but for those that are
    float32 in any case."""
    kinds = {described(tensors, slot.name)[0] for slot in slots(model) if not is_balance(slot)}
    return next((name for name, dtype in DTYPES.items() if kinds == {dtype.name}), "fp32")


def cast_tensor(name: str, tensor: Any, dtype: np.dtype) -> np.ndarray:
    """A tensor in the target dtype. Raises UserError where a value is not a finite number."""
    array = np.asarray(tensor)
    with np.errstate(over="ignore"):
        cast = np.require(array.astype(dtype, copy=False), requirements="C")
    if np.isfinite(cast).all():
        return cast
    if np.isfinite(array).all():
        cure = {"float16": "; use bf16 or fp32", "bfloat16": "; use fp32"}.get(dtype.name, "")
        raise UserError(f"dtype: {name} has values too large for {dtype}{cure}")
    raise UserError(
        f"{name}: holds values that are not finite: the training diverged, or the source is "
        "damaged; take an earlier checkpoint, or download it again"
    )


def refuse_dtype(dtype: str, known: Any) -> None:
    """Raises UserError for a dtype that the format does not have."""
    if dtype not in known:
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(known)}")
