"""Parts of a result that are rounded already: a folder beside it, with a file for each weight of a
layer.

    OUT.part/asked.json                        what was asked for, and of which model
    OUT.part/layers.down.7.safetensors         codes, scales and error of a weight of layer 7

A command that is interrupted goes on from there, and integers need not be in memory.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lmwright.core.contract import HfModel
from lmwright.core.param import Param
from lmwright.data.json_text import parse_json, write_json
from lmwright.errors import UserError
from lmwright.formats.hf_layout import slots
from lmwright.formats.places import new_place
from lmwright.formats.safetensors import Tensors, described
from lmwright.formats.transposed import transposed
from lmwright.guard.files import NO_SPACE, remove_leftovers, try_lock, write_whole
from lmwright.quantize.superblocks import KINDS, in_units
from lmwright.storage.bucket import is_bucket
from lmwright.storage.mirror import mirror_folder

ASKED = "asked.json"
FINISHED = {"finished": True}  # in its place once there is the result, which needs no parts
LOCK = ".lock"
ENDING = ".safetensors"
PART = re.compile(rf"(?P<path>.+)\.(?P<layer>\d+){re.escape(ENDING)}")
HASH = "xxh3_128"  # of a part's arrays, in its file


class Parts:
    """The integers of a model's weights in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def done(self) -> set[tuple[str, int]]:
        """The weights that are there, by path and layer."""
        found = (PART.fullmatch(path.name) for path in self.folder.glob(f"*{ENDING}"))
        return {(part["path"], int(part["layer"])) for part in found if part}

    def put(self, path: str, layer: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps codes int8 [*batch, I, O], scale float32 [*batch, groups, O], error float32
        [*batch] and, of a K-quant, offset and units of a weight of a layer."""
        with _disk(self.folder):
            write_whole(self._file(path, layer), save(dict(arrays), {HASH: _hash(arrays)}))

    def get(self, path: str, at: tuple[int, ...], name: str) -> np.ndarray:
        """The codes, or what else was put, of a matrix, `at` of which is its layer, then its place
        in the batch."""
        with safe_open(self._file(path, at[0]), "np") as file:
            return file.get_slice(name)[at[1:]] if at[1:] else file.get_tensor(name)

    def clear(self) -> None:
        """Removes the integers."""
        for path, layer in self.done:
            self._file(path, layer).unlink()

    def clear_damaged(self) -> None:
        """Removes the integers that are not those which were put, and tells so."""
        for path, layer in sorted(self.done):
            file = self._file(path, layer)
            try:
                with safe_open(file, "np") as part:
                    arrays = {name: part.get_tensor(name) for name in part.keys()}
                    whole = (part.metadata() or {}).get(HASH) == _hash(arrays)
            except (SafetensorError, ValueError, TypeError):
                whole = False
            if not whole:
                print(f"{file}: is damaged, and made again", file=sys.stderr)
                file.unlink()

    def remove(self) -> None:
        """Removes the integers and, unless there is something else in it, the folder."""
        with suppress(OSError):
            write_json(self.folder / ASKED, FINISHED)  # if it is killed, see `remove_finished`
        with suppress(OSError):
            self.clear()
            for name in (ASKED, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()

    def _file(self, path: str, layer: int) -> Path:
        return self.folder / f"{path}.{layer}{ENDING}"


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    found = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


class Rounded(Tensors):
    """Tensors of a model by Hugging Face name: those of `params`, which are rounded, by the
    integers of `parts`, the others as they are `stored`. `grid` is that of the model, `grids` are
    those of its weights by path and layer."""

    computed = True

    def __init__(
        self, model: HfModel, stored: Mapping[str, Any], params: Mapping[str, Param], parts: Parts,
        grid: str, rest: str, grids: Mapping[tuple[str, int], str],
    ):  # fmt: skip
        self.grid, self.rest, self._grids = grid, rest, grids
        self._stored, self._params, self._parts = stored, params, parts
        self._slots = {slot.name: slot for slot in slots(model)}
        super().__init__(self._slots)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor."""
        slot = self._slots[name]
        return ("float32", slot.shape) if self._rounded(name) else described(self._stored, name)

    def __getitem__(self, name: str) -> np.ndarray:
        if not self._rounded(name):
            return self._stored[name]
        codes, scale = self._put(name, "codes"), self._put(name, "scale")
        blocks = codes.reshape(*scale.shape, -1).astype(np.float32) * scale[..., None]
        if self._grid(name) in KINDS:
            blocks = blocks - self._put(name, "offset")[..., None]
        return blocks.reshape(codes.shape)

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """int8 codes [out, in] and float32 scales [out, groups] of a tensor, if it is rounded;
        in place of the scales of a K-quant the numbers of its blocks, [out, blocks, any]: integers
        of the scales and of the offsets, and their units."""
        if not self._rounded(name):
            return None
        codes, scale = self._put(name, "codes"), self._put(name, "scale")
        if (grid := self._grid(name)) not in KINDS:
            return codes, scale
        both = [("scale", "unit"), ("offset", "offset_unit")][: 1 + KINDS[grid].offset]
        pairs = [(self._put(name, a), self._put(name, unit)) for a, unit in both]
        whole = [in_units(a, unit) for a, unit in pairs]
        return codes, np.concatenate([*whole, *(unit[..., None] for _, unit in pairs)], axis=-1)

    def _put(self, name: str, what: str) -> np.ndarray:
        """Something of a rounded tensor, outputs first."""
        slot = self._slots[name]
        return transposed(self._parts.get(slot.path, slot.at, what))

    def errors(self) -> dict[str, float]:
        """Mean squared error of a matrix's results as a share of their mean square, by its name."""
        return {
            name.removesuffix(".weight"): float(self._parts.get(slot.path, slot.at, "error"))
            for name, slot in self._slots.items()
            if self._rounded(name)
        }

    def _grid(self, name: str) -> str:
        slot = self._slots[name]
        return self._grids[slot.path, slot.at[0]]

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
    `overwrite`, and for a folder of the user's."""
    parts = Parts(folder)
    _refuse_foreign(folder)
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
                parts.remove()
            raise
        parts.remove()


def remove_finished(folder: Path) -> None:
    """Removes the parts of a result that is there, if a command was killed while it did so."""
    with suppress(OSError, ValueError):
        if parse_json(folder / ASKED) == FINISHED:
            Parts(folder).remove()


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Disk trouble becomes a UserError."""
    try:
        yield
    except OSError as error:
        cure = "choose another OUT"
        if error.errno in NO_SPACE:
            cure = "free some space and run the same command again; it continues where it stopped"
        raise UserError(
            f"{folder}: cannot be written ({error.strerror or error}); {cure}"
        ) from error


def _refuse_foreign(folder: Path) -> None:
    """Raises UserError for something that is there and is not the work of a command."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names.isdisjoint((LOCK, ASKED)) and (names or folder.is_file()):
        raise UserError(
            f"{folder}: is where finished layers are kept for a restart, and holds something else; "
            "move it away, or choose another OUT"
        )


def _begin(parts: Parts, asked: Mapping[str, Any], overwrite: bool) -> None:
    """Notes what was asked for; parts of something else are removed if they may be."""
    remove_leftovers(parts.folder)
    note = parts.folder / ASKED
    try:
        before = parse_json(note) if note.exists() else None
    except ValueError:
        before = None
    if parts.done and before != asked:
        why = f"whose settings are not known ({ASKED} is missing or damaged)"
        if isinstance(before, dict):
            names = (name for name in asked if before.get(name) != asked[name])
            why = f"made with other settings ({', '.join(names)})"
        if not overwrite:
            raise UserError(
                f"{parts.folder}: holds finished layers, {why}; repeat the command that wrote them "
                "to continue, or add --overwrite to start again"
            )
        parts.clear()
    parts.clear_damaged()
    with _disk(parts.folder):
        write_json(note, asked)
