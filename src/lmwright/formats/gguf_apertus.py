"""Apertus in GGUF: the numbers of xIELU are metadata, one for each layer.

xielu.alpha_p    model.layers.{i}.mlp.act_fn.alpha_p
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.hf_layout import Slot
from lmwright.formats.safetensors import Tensors, described

NAME = "apertus"
FUNCTION = ".mlp.act_fn."
KEYS = {f"{FUNCTION}{part}": f"xielu.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")}
"""Of the metadata, by the ends of the tensors' names in a folder."""


def is_metadata(tensor: str) -> bool:
    """True for a tensor, by its name in a folder, that is a number in GGUF's metadata."""
    return tensor.endswith(tuple(KEYS))


def metadata(tensors: Mapping[str, np.ndarray], slots: Sequence[Slot]) -> dict[str, list[float]]:
    """The numbers of all layers by key; none of other families."""
    found: dict[str, list[float]] = {}
    for slot in slots:
        if is_metadata(slot.name):
            value = np.asarray(tensors[slot.name], np.float32).item()
            found.setdefault(KEYS[FUNCTION + slot.name.rpartition(".")[2]], []).append(value)
    return found


class WithNumbers(Tensors):
    """The tensors of a file, with those that its metadata hold. Raises UserError where they lack
    some."""

    def __init__(self, stored: Any, meta: Mapping[str, Any], slots: Sequence[Slot], where: str):
        self._stored, self.file, self._numbers = stored, stored.file, {}
        layers: dict[str, int] = {}
        for slot in slots:
            if not is_metadata(slot.name):
                continue
            key = KEYS[FUNCTION + slot.name.rpartition(".")[2]]
            number = layers[key] = layers.get(key, -1) + 1
            told = meta.get(key)
            each = told if isinstance(told, list) else [told] * (number + 1)
            if number >= len(each) or each[number] is None:
                raise UserError(f"{where}: its metadata lack {key} of layers; download it again")
            self._numbers[slot.name] = np.full(slot.shape, each[number], np.float32)
        super().__init__([*stored, *self._numbers])

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        if name in self._numbers:
            return "float32", self._numbers[name].shape
        return described(self._stored, name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._numbers[name] if name in self._numbers else self._stored[name]
