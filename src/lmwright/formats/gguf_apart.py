"""Matrices of a Hugging Face folder that are several tensors in GGUF."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmwright.formats.hf_layout import Slot
from lmwright.formats.safetensors import Tensors, described


@dataclass(frozen=True)
class Cut:
    """Cut of the matrices of a model whose names have one ending."""

    whole: str
    """The ending."""
    parts: tuple[str, ...]
    """Endings of the parts' names, by which the gguf package's table knows them."""
    shapes: tuple[tuple[int, ...], ...]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    join: Callable[..., np.ndarray]
    """The matrix of its parts, in their order."""


def in_parts(cuts: Sequence[Cut], slots: Iterable[Slot]) -> list[Slot]:
    """The tensors that hold these in GGUF."""
    found = []
    for slot in slots:
        cut = next((cut for cut in cuts if slot.name.endswith(cut.whole)), None)
        if cut is None:
            found.append(slot)
            continue
        stem, parts = slot.name.removesuffix(cut.whole), zip(cut.parts, cut.shapes, strict=True)
        found += [replace(slot, name=stem + part, shape=shape) for part, shape in parts]
    return found


class Apart(Tensors):
    """Tensors by Hugging Face names, with the parts beside them for whoever asks."""

    def __init__(self, stored: Mapping[str, np.ndarray], cuts: Sequence[Cut]):
        self._stored, self._cuts = stored, cuts
        self.file = getattr(stored, "file", None)  # of GGUF
        names = []
        for name in stored:
            found = self._part_of(name)
            names.append(name if found is None else found[1] + found[0].whole)
        super().__init__(dict.fromkeys(names))

    def _part_of(self, name: str) -> tuple[Cut, str, int] | None:
        """The cut of which a name is that of a part, its beginning and the part's number."""
        for cut in self._cuts:
            for number, part in enumerate(cut.parts):
                if name.endswith(part):
                    return cut, name.removesuffix(part), number
        return None

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        if name in self._stored:
            return described(self._stored, name)
        array = self[name]
        return array.dtype.name, array.shape

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._stored:
            return self._stored[name]
        if (found := self._part_of(name)) is not None:
            cut, stem, number = found
            whole = np.asarray(self._stored[stem + cut.whole])
            return np.ascontiguousarray(cut.split(whole)[number])
        cut = next(cut for cut in self._cuts if name.endswith(cut.whole))
        stem = name.removesuffix(cut.whole)
        return cut.join(*(np.asarray(self._stored[stem + part]) for part in cut.parts))
