"""Matrices that files hold as [in, out], as those of GPT-2 (transformers' Conv1D), under the layout
of all others, [out, in], and names that older files have without their beginning."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from lmwright.formats.safetensors import Tensors, described
from lmwright.formats.transposed import transposed
from lmwright.models.hf.table import Table


class OutputsFirst(Tensors):
    """The tensors of a folder, its matrices as [out, in]."""

    def __init__(self, stored: Mapping[str, np.ndarray], table: Table):
        self._stored, self._ends = stored, table.inputs_first
        self.not_taken = getattr(stored, "not_taken", ())
        prefix = table.body_prefix
        inside = [n.removeprefix(prefix) for n in table.weights.values() if n.startswith(prefix)]
        firsts = tuple(f"{name.partition('.')[0]}." for name in inside)
        bare = [name for name in stored if name.startswith(firsts)]
        self._name_of = {name: name for name in stored if name not in bare}
        self._name_of |= {f"{prefix}{name}": name for name in bare}
        super().__init__(self._name_of)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        dtype, shape = described(self._stored, self._name_of[name])
        return dtype, shape[::-1] if name.endswith(self._ends) else shape

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._stored[self._name_of[name]]
        return transposed(array) if name.endswith(self._ends) else array


def inputs_first(
    tensors: Iterable[tuple[str, np.ndarray]], ends: tuple[str, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a folder, those whose names have one of these ends as [in, out]."""
    for name, array in tensors:
        yield name, np.ascontiguousarray(transposed(array)) if name.endswith(ends) else array
