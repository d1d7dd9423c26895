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


def _by_key(slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    """The tensors that are metadata, of one layer after the other."""
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        for ending, key in KEYS.items():
            if slot.name.endswith(ending):
                found.setdefault(key, []).append(slot)
    return found


def metadata(tensors: Mapping[str, np.ndarray], slots: Sequence[Slot]) -> dict[str, list[float]]:
    """The numbers of all layers by key; none of other families."""
    value = lambda slot: np.asarray(tensors[slot.name], np.float32).item()  # noqa: E731
    return {key: [value(slot) for slot in each] for key, each in _by_key(slots).items()}


class WithNumbers(Tensors):
    """The tensors of a file, with those that its metadata hold. Raises UserError where they lack
    some."""

    def __init__(self, stored: Any, meta: Mapping[str, Any], slots: Sequence[Slot], where: str):
        self._stored, self.file, self._numbers = stored, stored.file, {}
        for key, each in _by_key(slots).items():
            numbers = meta.get(key)
            if not isinstance(numbers, list):  # one for all layers
                numbers = [] if numbers is None else [numbers] * len(each)
            if len(numbers) < len(each):
                raise UserError(f"{where}: its metadata lack {key} of layers; download it again")
            for slot, number in zip(each, numbers, strict=False):
                self._numbers[slot.name] = np.full(slot.shape, number, np.float32)
        super().__init__([*stored, *self._numbers])

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        if name in self._numbers:
            return "float32", self._numbers[name].shape
        return described(self._stored, name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._numbers[name] if name in self._numbers else self._stored[name]
