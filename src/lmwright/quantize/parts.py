"""Parts of a result that are rounded already: a folder beside it, with a file for each weight of a
layer.

    OUT.part/asked.json                        what was asked for, and of which model
    OUT.part/layers.down.7.safetensors         codes, scales and error of a weight of layer 7

A command that is interrupted goes on from there, and integers need not be in memory.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from lmwright.core.contract import HfModel
from lmwright.core.param import Param
from lmwright.data.json_text import parse_json, write_json
from lmwright.errors import UserError
from lmwright.formats.hf_layout import slots
from lmwright.formats.places import new_place
from lmwright.formats.safetensors import Tensors, described
from lmwright.formats.transposed import transposed
from lmwright.guard.files import remove_leftovers, try_lock, write_whole
from lmwright.storage.bucket import is_bucket
from lmwright.storage.mirror import mirror_folder

ASKED = "asked.json"
LOCK = ".lock"
ENDING = ".safetensors"


class Parts:
    """The integers of a model's weights in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def done(self) -> set[tuple[str, int]]:
        """The weights that are there, by path and layer."""
        names = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return {(path, int(layer)) for path, _, layer in (n.rpartition(".") for n in names)}

    def put(self, path: str, layer: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps codes int8 [*batch, I, O], scale float32 [*batch, groups, O] and error float32
        [*batch] of a weight of a layer."""
        with _disk(self.folder):
            write_whole(self._file(path, layer), save(dict(arrays)))

    def get(self, path: str, at: tuple[int, ...], name: str) -> np.ndarray:
        """The codes, scale or error of a matrix, `at` of which is its layer, then its place in the
        batch."""
        with safe_open(self._file(path, at[0]), "np") as file:
            return file.get_slice(name)[at[1:]] if at[1:] else file.get_tensor(name)

    def clear(self) -> None:
        """Removes the integers."""
        for path, layer in self.done:
            self._file(path, layer).unlink()

    def _file(self, path: str, layer: int) -> Path:
        return self.folder / f"{path}.{layer}{ENDING}"


class Rounded(Tensors):
    """Tensors of a model by Hugging Face name: those of `params`, which are rounded, by the
    integers of `parts`, the others as they are `stored`."""

    computed = True

    def __init__(
        self, model: HfModel, stored: Mapping[str, Any], params: Mapping[str, Param], parts: Parts,
        grid: str, rest: str,
    ):  # fmt: skip
        self.grid, self.rest = grid, rest
        self._stored, self._params, self._parts = stored, params, parts
        self._slots = {slot.name: slot for slot in slots(model)}
        super().__init__(self._slots)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor."""
        slot = self._slots[name]
        return ("float32", slot.shape) if self._rounded(name) else described(self._stored, name)

    def __getitem__(self, name: str) -> np.ndarray:
        if (found := self.codes(name)) is None:
            return self._stored[name]
        codes, scale = found  # [out, in] and [out, groups]
        blocks = codes.reshape(*scale.shape, -1).astype(np.float32)
        return (blocks * scale[..., None]).reshape(codes.shape)

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """int8 codes [out, in] and float32 scales [out, groups] of a tensor, if it is
        rounded."""
        if not self._rounded(name):
            return None
        slot = self._slots[name]
        codes, scale = (self._parts.get(slot.path, slot.at, each) for each in ("codes", "scale"))
        return transposed(codes), transposed(scale)

    def errors(self) -> dict[str, float]:
        """Mean squared error of a matrix's results as a share of their mean square, by its name."""
        return {
            name.removesuffix(".weight"): float(self._parts.get(slot.path, slot.at, "error"))
            for name, slot in self._slots.items()
            if self._rounded(name)
        }

    def _rounded(self, name: str) -> bool:
        return self._slots[name].path in self._params


def folder_of(out: str | Path) -> Path:
    """OUT.part, where the work on an output is kept; of one in a bucket in the cache."""
    place = mirror_folder(out) if is_bucket(out) else new_place(out).absolute()
    return place.with_name(f"{place.name}.part")


@contextmanager
def kept_parts(folder: Path, asked: Mapping[str, Any], overwrite: bool) -> Iterator[Parts]:
    """The parts that are in a folder already, for more. It is removed at the end, if that is a good
    one or if nothing was done. Raises UserError for parts of another command, unless
    `overwrite`."""
    parts = Parts(folder)
    with ExitStack() as stack:
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / LOCK, "a"))
        if not try_lock(lock):
            raise UserError(
                f"{folder}: is being written by another command; wait for it, or choose another OUT"
            )
        try:
            _begin(parts, asked, overwrite)
            yield parts
        except BaseException:
            if not parts.done:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Disk trouble becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror or error}); free some space or choose "
            "another OUT"
        ) from error


def _begin(parts: Parts, asked: Mapping[str, Any], overwrite: bool) -> None:
    """Notes what was asked for; parts of something else are removed if they may be."""
    remove_leftovers(parts.folder)
    note = parts.folder / ASKED
    try:
        before = parse_json(note) if note.exists() else {}
    except ValueError:
        before = {}
    if parts.done and before != asked:
        names = ", ".join(name for name in asked if before.get(name) != asked[name])
        if not overwrite:
            raise UserError(
                f"{parts.folder}: holds finished layers, made with other settings ({names}); give "
                "the same again to go on after them, or --overwrite to begin again"
            )
        parts.clear()
    with _disk(parts.folder):
        write_json(note, asked)
