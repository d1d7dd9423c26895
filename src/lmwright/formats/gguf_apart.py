"""Matrices of a Hugging Face folder that are several tensors in GGUF."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmwright.formats.hf_layout import Slot
from lmwright.formats.safetensors import Tensors, described


@dataclass(frozen=True)
class Cut:
    """How the matrices of a model whose names have one ending are cut."""

    whole: str
    """The ending."""
    parts: tuple[str, ...]
    """Endings of the parts' names, by which the gguf package's table knows them."""
    shapes: tuple[tuple[int, ...], ...]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    join: Callable[..., np.ndarray]
    """The matrix of its parts, in their order."""


def in_parts(cut: Cut, slots: Iterable[Slot]) -> list[Slot]:
    """The tensors that hold these in GGUF."""
    found = []
    for slot in slots:
        if not slot.name.endswith(cut.whole):
            found.append(slot)
            continue
        stem, parts = slot.name.removesuffix(cut.whole), zip(cut.parts, cut.shapes, strict=True)
        found += [replace(slot, name=stem + part, shape=shape) for part, shape in parts]
    return found


class Apart(Tensors):
    """Tensors by Hugging Face names, with the parts beside them for whoever asks."""

    def __init__(self, stored: Mapping[str, np.ndarray], cut: Cut):
        self._stored, self._cut = stored, cut
        self.file = getattr(stored, "file", None)  # of GGUF
        names = []
        for name in stored:
            end = next((part for part in cut.parts if name.endswith(part)), "")
            names.append(name.removesuffix(end) + cut.whole if end else name)
        super().__init__(dict.fromkeys(names))

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        if name in self._stored:
            return described(self._stored, name)
        array = self[name]
        return array.dtype.name, array.shape

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._stored:
            return self._stored[name]
        cut = self._cut
        if name.endswith(cut.whole):
            stem = name.removesuffix(cut.whole)
            return cut.join(*(np.asarray(self._stored[stem + part]) for part in cut.parts))
        number = next(i for i, part in enumerate(cut.parts) if name.endswith(part))
        whole = np.asarray(self._stored[name.removesuffix(cut.parts[number]) + cut.whole])
        return np.ascontiguousarray(cut.split(whole)[number])
