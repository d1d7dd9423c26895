"""Weights to and from the Hugging Face layout.

    our tree --model.hf.weights: names, the arrow: layout--> tensors by name
    layers.q [L, D, N, H]                                    model.layers.0.self_attn.q_proj.weight
                                                             [N * H, D], one for each layer

A matrix `in -> out` is a Linear [out, in]; a table `vocab -> embed` and everything without
an arrow stay as they are, flattened. Every tensor is used exactly once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from podsmith.checkpoint.safetensors import some
from podsmith.core.param import Param, Tree, walk
from podsmith.core.pattern import LAYERS
from podsmith.errors import UserError

IGNORED_ENDINGS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "attn.bias_mask")
TIED_HEAD = "lm_head.weight"
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Slot:
    """One tensor of the Hugging Face layout and where it lives in our tree."""

    name: str
    path: str
    at: tuple[int, ...]
    """Index of this tensor's part in the stacked leaf: its layer, then its expert; () where the
    leaf is the tensor."""
    shape: tuple[int, ...]
    """Shape over there."""
    param: Param
    """Its Param, stacked as in the spec."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def to_layout(self, leaf: Any, dtype: Any = np.float32) -> np.ndarray:
        """The leaf's part for this tensor, on the host, in their layout and `dtype`."""
        part = leaf[self.at] if self.at else leaf
        array = np.asarray(part).astype(dtype, copy=False)
        if _is_linear(self.param):
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))

    def from_layout(self, array: np.ndarray) -> np.ndarray:
        """float32 in our layout, without the stacked axes."""
        if _is_linear(self.param):
            array = array.T
        return np.asarray(array, np.float32).reshape(self.param.shape[len(self.at) :])


def _is_linear(param: Param) -> bool:
    return param.is_matrix and param.inputs != ("vocab",)


def slots(model: Any) -> list[Slot]:
    """Every tensor of the model over there, once: what precedes the layers, then layer by
    layer, then the rest.

    A model's table has one name for a weight of all kinds of layers, `layers.q`, whatever
    stacks the layers are in; `{}` in it is the number of an expert. Raises UserError for a
    reasoning layer, which has no name over there.
    """
    if getattr(model, "reasoning", None) is not None:
        raise UserError(
            "model.reasoning: no Hugging Face architecture has reasoning layers; "
            "keep the run directory, or train without them to export"
        )
    places = {path: numbers for span in model.spans for path, _, numbers in span.places()}
    outer, layered = [], []
    for path, param in walk(model.spec()):
        stack, _, leaf = path.rpartition(".")
        if stack in places:
            template = model.hf.weights[f"{LAYERS}.{leaf}"]
            shape, inside = _their_shape(param), param.shape[1 : len(param.batch)]
            layered += [
                (number, Slot(template.format(*at, i=number), path, (i, *at), shape, param))
                for i, number in enumerate(places[stack])
                for at in np.ndindex(inside)
            ]
        else:
            outer.append(Slot(model.hf.weights[path], path, (), _their_shape(param), param))
    layered.sort(key=lambda numbered: numbered[0])
    tables = [slot for slot in outer if slot.param.inputs == ("vocab",)]
    rest = [slot for slot in outer if slot not in tables]
    return tables + [slot for _, slot in layered] + rest


def _their_shape(param: Param) -> tuple[int, ...]:
    fan_in, fan_out = param.matrix_shape
    flat = (fan_in, fan_out) if param.is_matrix else (fan_out,)
    return flat[::-1] if _is_linear(param) else flat


def to_hf(model: Any, w: Tree) -> dict[str, np.ndarray]:
    """All weights (or gradients), float32 on the host, under their Hugging Face names."""
    leaves = dict(walk(w))
    return {slot.name: slot.to_layout(leaves[slot.path]) for slot in slots(model)}


def from_hf(model: Any, given: Mapping[str, Any], where: str = "weights") -> Tree:
    """Our weights, float32 arrays on the host, from tensors by Hugging Face name.

    Raises UserError, naming the tensors, where one is missing, unknown, of another shape or
    not a float.
    """
    wanted = slots(model)
    _check_names(wanted, given, where)
    leaves = {path: np.empty(param.shape, np.float32) for path, param in walk(model.spec())}
    for slot in wanted:
        array = np.asarray(given[slot.name])
        if array.dtype.name not in FLOATS:
            raise UserError(
                f"{where}: {slot.name} is {array.dtype.name}; quantized weights are not "
                f"supported, so start from the unquantized model"
            )
        if array.shape != slot.shape:
            raise UserError(
                f"{where}: {slot.name} has shape {list(array.shape)}, config.json implies "
                f"{list(slot.shape)}; they are not of one model"
            )
        leaves[slot.path][slot.at or ...] = slot.from_layout(array)
    return _nested(leaves)


def _check_names(wanted: list[Slot], given: Mapping[str, Any], where: str) -> None:
    names = {slot.name for slot in wanted}
    missing = sorted(names - set(given))
    if missing:
        raise UserError(f"{where}: lacks {some(missing)}; the folder is not complete")
    extra = [n for n in sorted(set(given) - names) if not n.endswith(IGNORED_ENDINGS)]
    if TIED_HEAD in extra:
        table = next(slot.name for slot in wanted if slot.param.inputs == ("vocab",))
        if np.array_equal(np.asarray(given[TIED_HEAD]), np.asarray(given[table])):
            extra.remove(TIED_HEAD)
        else:
            raise UserError(
                f"{where}: {TIED_HEAD} differs from {table} although config.json ties them; "
                f"set tie_word_embeddings to false if the head is its own"
            )
    if extra:
        raise UserError(
            f"{where}: holds {some(extra)}, which this architecture does not have; "
            f"importing without them would be another model"
        )


def _nested(leaves: dict[str, np.ndarray]) -> Tree:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree
