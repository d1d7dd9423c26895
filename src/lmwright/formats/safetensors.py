"""Weights in safetensors files, one or several: read lazily, written shard by shard.

    model.safetensors                                  one file, or
    model.safetensors.index.json                       tensor name -> file
    model-00001-of-00002.safetensors, ...

Only this format is read: pickled `.bin` files run code when they are opened.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lmwright.data.json_text import parse_json, write_json
from lmwright.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_PICKLES = (
    "which run code when opened and are never read here; get the safetensors version, or convert "
    "them in a sandbox with transformers: save_pretrained(folder)"
)

DTYPES = {"fp32": np.dtype("f4"), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype("f2")}


NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8",
    "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
FLOAT8 = NAMES["F8_E4M3"]


def described(tensors: Mapping[str, Any], name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a tensor, without reading it where the mapping knows."""
    if hasattr(tensors, "described"):
        return tensors.described(name)
    return tensors[name].dtype.name, tuple(tensors[name].shape)


class Tensors(Mapping[str, np.ndarray]):
    """Tensors by name; a subclass defines how one is read when it is asked for."""

    computed: ClassVar[bool] = False
    """True where they are not what a file holds."""

    def __init__(self, names: Collection[str]):
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorFiles(Tensors):
    """Tensors of a folder by name; each is read when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = _open_files(folder)
        self._file_of = {name: path for path, file in self._files.items() for name in file.keys()}
        super().__init__(self._file_of)
        self._check_index()

    def _check_index(self) -> None:
        if sum(len(file.keys()) for file in self._files.values()) != len(self._file_of):
            raise UserError(f"{self.folder}: two shards hold the same tensor; download them again")
        if not (self.folder / INDEX).exists():
            return
        listed = _weight_map(self.folder)
        wrong = [
            name for name, file in listed.items() if self._file_of.get(name) != self.folder / file
        ] + sorted(set(self._file_of) - set(listed))
        if wrong:
            raise UserError(
                f"{self.folder / INDEX}: disagrees with the shards about {some(wrong)}; download "
                "the folder again"
            )

    def __getitem__(self, name: str) -> np.ndarray:
        if self.described(name)[0] == FLOAT8:  # which the library has no NumPy type for
            return _read_float8(self._file_of[name], name)
        return self._files[self._file_of[name]].get_tensor(name)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor from the file's header."""
        part = self._files[self._file_of[name]].get_slice(name)
        return NAMES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())


def _read_float8(path: Path, name: str) -> np.ndarray:
    """The tensor, by the header of a file that the library has opened before."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        said = json.loads(file.read(length))[name]
        begin, end = said["data_offsets"]
        file.seek(8 + length + begin)
        codes = np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn)
    return codes.reshape(said["shape"])


def some(names: Iterable[str], count: int = 6) -> str:
    """The first of the names, and how many more there are, as text."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def _open_files(folder: Path) -> dict[Path, Any]:
    if (folder / INDEX).exists():
        paths = [folder / name for name in sorted(set(_weight_map(folder).values()))]
    elif (folder / SINGLE).exists():
        paths = [folder / SINGLE]
    else:
        refuse_pickles(folder)
        raise UserError(
            f"{folder}: no {SINGLE} and no {INDEX}; point at a folder that holds one of them"
        )
    return {path: _open(path) for path in paths}


def _open(path: Path) -> Any:
    try:
        # a memory map would count every page that was read as held
        return safe_open(path, framework="np", backend="pread")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; the index names it, so download it too") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: truncated or damaged ({error}); download or export it again"
        ) from None


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        listed = parse_json(folder / INDEX)["weight_map"]
        # a path that leaves the folder would read whatever lies there
        if any(Path(file).name != file or "\0" in file for file in listed.values()):
            raise ValueError("a shard's name is not a file name in the folder")
        return dict(listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / INDEX}: not an index of shards ({error!r:.200}); download it again"
        ) from None


def refuse_pickles(folder: Path) -> None:
    """Raises UserError for a folder whose weights are pickled and nothing else."""
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        return
    if pickles := [p.name for pattern in PICKLES for p in sorted(folder.glob(pattern))]:
        raise UserError(f"{folder}: holds only pickled weights ({some(pickles)}), {NO_PICKLES}")


def plan_shards(sizes: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Names cut, in order, into shards of at most `max_shard_bytes`; a larger tensor is alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shards: list[list[str]], total: int
) -> None:
    """Writes (name, array) pairs, which come in the order of `shards`, one shard in memory at
    a time; the index is written where there are several. `total` is in bytes."""
    stream = iter(tensors)
    os.umask(umask := os.umask(0o022))
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {}
        for expected in names:
            name, array = next(stream)
            if name != expected:
                raise ValueError(f"tensor {name!r} came where {expected!r} was planned")
            shard[name] = array
            weight_map[name] = file
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o666 & ~umask)  # the library makes it private
        del shard, array
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
