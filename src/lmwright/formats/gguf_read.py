"""A GGUF file read: metadata to config.json, tensors by Hugging Face name, dequantized one at a
time by the gguf package.

    file --header--> config.json --> model --slots--> tensor by tensor --> our layout
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats import gguf_hybrid
from lmwright.formats.gguf_names import (
    Arch,
    NameMap,
    arch_of,
    config_of,
    gguf_package,
    pairs,
    rotated_heads,
)
from lmwright.formats.gguf_rope import ROPE_FACTORS, llama3_rope
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.safetensors import Tensors
from lmwright.formats.ternary import floats_of_values
from lmwright.storage.mirror import shown

MOST_ENTRIES = 2**23  # of a list in the header; vocabularies have 2**18
SCALE = ".scale"  # of a tensor whose values are codes alone
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufFile:
    """The header of a GGUF file, checked: metadata, and where each tensor lies.

    Raises UserError for a file that is cut, damaged or one of several parts.
    """

    def __init__(self, path: Path):
        gguf = gguf_package()
        self.path = path
        try:
            reader = _reader(gguf)(path)
            self.meta = {name: field.contents() for name, field in reader.fields.items()}
        except FileNotFoundError:
            raise UserError(f"{shown(path)}: is not there") from None
        except Exception as error:  # the reader trusts the file: it raises whatever comes of it
            raise UserError(
                f"{path}: not a GGUF file, or truncated or damaged "
                f"({str(error) or type(error).__name__}); download it again"
            ) from None
        if reader.endianess.name == "BIG":
            raise UserError(f"{path}: is a big-endian GGUF file; get the little-endian one")
        if int(self.meta.get("split.count") or 0) > 1:
            raise UserError(
                f"{path}: is one of {self.meta['split.count']} parts; merge them with "
                f"llama-gguf-split --merge"
            )
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        size = path.stat().st_size
        for tensor in self.tensors.values():
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise UserError(f"{path}: ends within {tensor.name}; download it again")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in numpy's order."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape.tolist()))

    def kind(self, name: str) -> str:
        """Type of a tensor, such as Q4_K."""
        return self.tensors[name].tensor_type.name

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """A tensor, or its part on the first axis: as stored if that is a float, float32 from
        a quantized one."""
        tensor, shape = self.tensors[name], self.shape(name)
        size, offset = int(tensor.n_bytes), int(tensor.data_offset)
        if part is not None:
            size //= shape[0]
            offset, shape = offset + part * size, shape[1:]
        # not through the reader's memory map, whose pages would stay
        raw = np.fromfile(self.path, np.uint8, count=size, offset=offset)
        if self.kind(name) in PLAIN:
            kind = PLAIN[self.kind(name)]
            return raw.view(ml_dtypes.bfloat16 if kind == "bfloat16" else kind).reshape(shape)
        rows = int(np.prod(shape[:-1]))
        try:
            values = gguf_package().dequantize(raw.reshape(rows, -1), tensor.tensor_type)
        except NotImplementedError:
            raise UserError(
                f"{self.path}: {name} is {self.kind(name)}, which the gguf package cannot read"
            ) from None
        return values.reshape(shape)


@cache
def _reader(gguf: Any) -> type:
    """GGUFReader, three times as fast on long vocabularies. It never reads past the end of the
    file: the package would go on reading nothing for as long as a damaged count says."""

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._array

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._array = mapped.view(np.ndarray)  # slices of a memmap are slow to make

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **by: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self._array):
                raise ValueError(f"entry at byte {offset} goes beyond its end")
            return super()._get(offset, dtype, count, *order, **by)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                entries = int(self._get(orig_offs + 4, np.uint64)[0])
                if entries > MOST_ENTRIES:
                    raise ValueError(f"array at byte {orig_offs} of {entries:,} entries")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader


class GgufTensors(Tensors):
    """The tensors of a file under their Hugging Face names and in their layout; what has no
    such name keeps its own, so that nothing goes unnoticed."""

    def __init__(self, file: GgufFile, model: HfModel, config: Mapping[str, Any], arch: Arch):
        self.file, self._config, self._arch = file, config, arch
        name_of = NameMap(str(file.meta["general.architecture"]), config["num_hidden_layers"])
        places = {slot.name: name_of(slot.name) for slot in slots_in_file(model)}
        self._places = {hf: place for hf, place in places.items() if self._has(*place)}
        self._scales = {
            slot.name: places[slot.name][0].removesuffix(".weight") + SCALE
            for slot in slots_in_file(model)
            if slot.param.ternary
        }
        taken = {name for name, _ in self._places.values()} | {ROPE_FACTORS}
        taken |= set(self._scales.values())
        self._places |= {name: (name, None) for name in file.tensors if name not in taken}
        super().__init__(self._places)

    def _has(self, name: str, part: int | None) -> bool:
        known = name in self.file.tensors
        return known and (part is None or part < self.file.shape(name)[0])

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype once dequantized, shape)."""
        there, part = self._places[name]
        kind, shape = self.file.kind(there), self.file.shape(there)
        # integers are no quantized weights
        dtype = PLAIN.get(kind, kind if kind in ("I8", "I16", "I32", "I64") else "float32")
        if self._arch.shift_of(name) or name.endswith(".A_log"):
            dtype = "float32"
        shape = shape if part is None else shape[1:]
        return dtype, gguf_hybrid.shape_of(name, shape) if self._arch.hybrid else shape

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.file.read(*self._places[name])
        if name in self._scales:
            scale, known = self._scales[name], self._scales[name] in self.file.tensors
            array = floats_of_values(array, self.file.read(scale) if known else None, name)
        heads = rotated_heads(name, self._config) if self._arch.rotated else None
        if heads is not None:
            array = pairs(array, heads, into=False)
        if self._arch.hybrid:
            array = gguf_hybrid.turned(name, array, self._config, into=False)
        if shift := self._arch.shift_of(name):
            array = array.astype(np.float32) - shift
        return array


def is_headless(model: HfModel) -> bool:
    """True for an encoder, whose head GGUF files leave out."""
    return model.both_ways and not model.fills_masks


def slots_in_file(model: HfModel) -> list[Slot]:
    """The tensors of the Hugging Face checkpoint that a GGUF file holds: of an encoder all but its
    head."""
    head = dict(walk(model.head_weights(model.spec()))) if is_headless(model) else {}
    own = {path for path, param in head.items() if param.inputs != ("vocab",)}
    return [slot for slot in slots(model) if slot.path not in own]


def open_gguf(path: Path) -> tuple[GgufFile, Any, GgufTensors]:
    """(file, model, tensors by Hugging Face name) of a GGUF file; nothing is read yet."""
    from lmwright.formats.hf_read import model_from_config

    file = GgufFile(path)
    config = config_of(file.meta, {name: file.shape(name) for name in file.tensors}, str(path))
    name, arch = arch_of(file.meta, str(path))
    if ROPE_FACTORS in file.tensors and not arch.factors:
        raise UserError(
            f"{path}: holds {ROPE_FACTORS}, which llama.cpp's {name} does not compute with; "
            "download another conversion of the model"
        )
    if ROPE_FACTORS in file.tensors:
        llama3_rope(config, file.read(ROPE_FACTORS), str(path))
    missing = [k for k in ("num_hidden_layers", "hidden_size") if not config.get(k)]
    if missing:
        raise UserError(f"{path}: its metadata lack {', '.join(missing)}; download it again")
    model = model_from_config(config, str(path))
    return file, model, GgufTensors(file, model, config, arch)
