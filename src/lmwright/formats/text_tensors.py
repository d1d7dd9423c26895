"""The text model's tensors in a checkpoint that holds more; what is not taken is counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.text_part import TextPart


@dataclass(frozen=True)
class NotTaken:
    """A part of the source that is no part of the text model."""

    part: str
    tensors: int
    parameters: int


class TextTensors(Tensors):
    """Tensors under the names that the text model alone gives them. A tensor that belongs to
    no known part keeps its name, so that it is found to be left over."""

    def __init__(self, stored: Mapping[str, np.ndarray], part: TextPart, where: str):
        self._stored = stored
        self._name_of: dict[str, str] = {}
        super().__init__(self._name_of)
        apart: dict[str, list[int]] = {}
        for name in stored:
            if (other := _after(name, part.others)) is not None:
                size = int(np.prod(described(stored, name)[1]))
                apart.setdefault(other[0], []).append(size)
                continue
            inner = _after(name, part.prefixes)
            alone = name if inner is None else inner[0] + _replaced(inner[1], part.inner)
            if alone in self._name_of:
                raise UserError(
                    f"{where}: {name} and {self._name_of[alone]} map to the same tensor of the "
                    "text model; download the folder again"
                )
            self._name_of[alone] = name
        self.not_taken = tuple(NotTaken(what, len(n), sum(n)) for what, n in apart.items())

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        return described(self._stored, self._name_of[name])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[self._name_of[name]]


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    """The name, with the one part of it that has a replacement replaced."""
    for part, meaning in parts.items():
        if part in name:
            return name.replace(part, meaning)
    return name


def _after(name: str, prefixes: Mapping[str, Any]) -> tuple[str, str] | None:
    """(replacement of its beginning, the rest of the name), if the name has one of these
    beginnings."""
    for prefix, meaning in prefixes.items():
        if name.startswith(prefix):
            return meaning, name.removeprefix(prefix)
    return None
