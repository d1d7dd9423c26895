"""Weights to and from the Hugging Face layout.

    our tree --model.hf.weights: names, the arrow: layout--> tensors by name
    layers.q [L, D, N, H]                                    model.layers.0.self_attn.q_proj.weight
                                                             [N * H, D], one for each layer

A matrix `in -> out` is a Linear [out, in]; a table `vocab -> embed` and everything without
an arrow stay as they are, flattened; filters of convolutions are [numbers, 1, tokens], and some
vectors [1, numbers] or [heads, numbers]. Every tensor is used exactly once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Param, Tree, walk
from lmwright.core.stack import LAYERS
from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors
from lmwright.formats.transposed import transposed
from lmwright.models.over import encoder_of


@dataclass(frozen=True)
class Slot:
    """One tensor of the Hugging Face layout and where it lives in our tree."""

    name: str
    path: str
    at: tuple[int, ...]
    """Index of this tensor's part in the stacked leaf: its layer, then its expert or head; ()
    where the leaf is the tensor."""
    shape: tuple[int, ...]
    """Shape in the Hugging Face layout."""
    param: Param
    """Param of the weight, stacked as in the spec."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def is_linear(self) -> bool:
        """True for the matrix of a Linear there, not for a table."""
        return _is_linear(self.param)

    def to_layout(self, leaf: Any) -> np.ndarray:
        """The leaf's part for this tensor, on the host, in their layout and the leaf's dtype."""
        array = np.asarray(leaf[self.at] if self.at else leaf)
        if self.is_linear:
            array = transposed(array.reshape(self.shape[::-1]))
        return np.require(array.reshape(self.shape), requirements="C")

    def from_layout(self, array: np.ndarray) -> np.ndarray:
        """The tensor in our layout and its own dtype, without the stacked axes."""
        if self.is_linear:
            array = transposed(array)
        return array.reshape(self.param.shape[len(self.at) :])


class HfTensors(Tensors):
    """The weights of a model by Hugging Face name, each laid out when it is asked for; `codes` are
    integers and scales on a `grid` of those that are rounded, by path, beside which a file holds
    the others as `rest`."""

    computed = True

    def __init__(
        self, model: HfModel, weights: Tree, codes: Mapping[str, tuple[Any, Any]] | None = None,
        grid: str = "", rest: str = "fp32",
    ):  # fmt: skip
        self.weights, self.grid, self.rest, self._model = weights, grid, rest, model
        self._codes = codes or {}
        self._leaves = dict(walk(weights))

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        """Slots by name; computed late, since a model without Hugging Face names generates text,
        too."""
        return {slot.name: slot for slot in slots(self._model)}

    @property
    def _names(self) -> Collection[str]:  # type: ignore[override]
        return self._slots

    def __getitem__(self, name: str) -> np.ndarray:
        slot = self._slots[name]
        return slot.to_layout(self._leaves[slot.path])

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """int8 codes [out, in] and float32 scales [out, groups] of a tensor, if it is
        rounded."""
        slot = self._slots[name]
        if slot.path not in self._codes:
            return None
        codes, scale = self._codes[slot.path]
        scale = np.asarray(scale[slot.at] if slot.at else scale)
        return slot.to_layout(codes), transposed(scale.reshape(-1, slot.shape[0]))


def _is_linear(param: Param) -> bool:
    return param.is_matrix and param.inputs not in (("vocab",), ("distances",))


def slots(model: HfModel) -> list[Slot]:
    """Every tensor of the Hugging Face checkpoint, in order: embedding, layers, then norm and
    head.

    A model's table has one name for a weight of all kinds of layers, `layers.q`, whatever
    stacks the layers are in; `{}` in it is the number of an expert or a head. Raises
    UserError for a reasoning layer, which has no name over there.
    """
    below = encoder_of(model)
    if getattr(below, "reasoning", None) is not None:
        raise UserError(
            "model.reasoning: no Hugging Face architecture has reasoning layers; "
            "keep the run directory, or train without them to export"
        )
    places = {path: numbers for span in below.spans for path, _, numbers in span.places()}
    outer, layered = [], []
    for path, param in walk(model.spec()):
        stack, _, leaf = path.rpartition(".")
        if stack in places:
            template = _name(model, f"{LAYERS}.{leaf}")
            shape, inside = _their_shape(param), param.shape[1 : len(param.batch)]
            if f"{LAYERS}.{leaf}" in model.hf.convs:
                shape = (shape[0] // param.shape[-1], 1, param.shape[-1])
            if f"{LAYERS}.{leaf}" in model.hf.rows:
                shape = (1, *shape)
            if f"{LAYERS}.{leaf}" in model.hf.by_head:
                shape = param.shape[len(param.batch) :]
                if "{}" in template:
                    inside, shape = (*inside, *shape[:-1]), shape[-1:]
            layered += [
                (number, Slot(template.format(*at, i=number), path, (i, *at), shape, param))
                for i, number in enumerate(places[stack])
                for at in np.ndindex(inside)
            ]
        else:
            outer.append(Slot(_name(model, path), path, (), _their_shape(param), param))
    layered.sort(key=lambda numbered: numbered[0])
    tables = [slot for slot in outer if slot.param.inputs == ("vocab",)]
    rest = [slot for slot in outer if slot not in tables]
    return tables + [slot for _, slot in layered] + rest


def _name(model: HfModel, path: str) -> str:
    """Name of a weight over there. Raises UserError for one that the family does not have there."""
    if (name := model.hf.weights.get(path)) is None:
        model.hf.config(model)  # which says what it cannot have
        raise UserError(f"model: Hugging Face's {model.hf.name} has no {path}; change the model")
    return name


def _their_shape(param: Param) -> tuple[int, ...]:
    fan_in, fan_out = param.matrix_shape
    if param.axes == param.batch:  # a number
        return ()
    flat = (fan_in, fan_out) if param.is_matrix else (fan_out,)
    return flat[::-1] if _is_linear(param) else flat
