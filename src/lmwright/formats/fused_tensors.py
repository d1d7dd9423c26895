"""Tensors of a checkpoint in which several matrices are one, under the names of each alone."""

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.hf.table import Fused

WHOLE = slice(None)


class FusedTensors(Tensors):
    """Parts of fused tensors, whose rows are all but their last axis; other tensors as they are.
    One is read when a part of it is asked for, and kept until another is. Raises UserError for a
    fused tensor with other rows than its parts have."""

    def __init__(self, stored: Mapping[str, np.ndarray], parts: Fused, where: str):
        self._stored = stored
        self.not_taken = getattr(stored, "not_taken", ())
        self._read: tuple[str, np.ndarray] = "", np.empty(0)
        self._part_of: dict[str, tuple[str, slice]] = {}
        super().__init__(self._part_of)
        for name in stored:
            ending = next((ending for ending in parts if name.endswith(ending)), None)
            if ending is None:
                self._part_of[name] = name, WHOLE
                continue
            sizes = [rows for _, rows in parts[ending]]
            shape = described(stored, name)[1]
            if (found := math.prod(shape[:-1] or shape)) != sum(sizes):
                raise UserError(
                    f"{where}: {name} has {found} rows, config.json implies {sum(sizes)}; they do "
                    "not belong to the same model"
                )
            ends = pairwise(np.cumsum([0, *sizes]).tolist())
            for (own, _), (start, stop) in zip(parts[ending], ends, strict=True):
                self._part_of[name.removesuffix(ending) + own] = name, slice(start, stop)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        source, rows = self._part_of[name]
        dtype, shape = described(self._stored, source)
        if rows == WHOLE:
            return dtype, shape
        return dtype, (rows.stop - rows.start, *shape[max(1, len(shape) - 1) :])

    def __getitem__(self, name: str) -> np.ndarray:
        source, rows = self._part_of[name]
        if rows == WHOLE:
            return self._stored[source]
        read = self._read
        if read[0] != source:
            array = self._stored[source]
            last = array.shape[max(1, array.ndim - 1) :]
            read = self._read = source, array.reshape(-1, *last)
        return read[1][rows]
