"""A GGUF file read: metadata to config.json, tensors by Hugging Face name, dequantized one at a
time by the gguf package.

    file --header--> config.json --> model --slots--> tensor by tensor --> our layout
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import walk
from lmwright.data.tokens.gguf_header import GgufHeader, gguf_package
from lmwright.errors import UserError
from lmwright.formats import (
    gguf_apertus,
    gguf_deepseek,
    gguf_falcon,
    gguf_further,
    gguf_gemma4,
    gguf_hybrid,
    gguf_mamba,
)
from lmwright.formats.gguf_apart import Apart, Cut, in_parts
from lmwright.formats.gguf_names import (
    Arch,
    NameMap,
    arch_of,
    config_of,
    gguf_arch_of,
    metadata_of,
)
from lmwright.formats.gguf_order import in_order
from lmwright.formats.gguf_rope import ROPE_FACTORS, llama3_rope, proportional_rope
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.safetensors import Tensors
from lmwright.formats.ternary import floats_of_values
from lmwright.models.granite4 import HybridGranite
from lmwright.models.granite_moe import GraniteExperts
from lmwright.models.latent import Latent
from lmwright.models.qwen3_next import Qwen3Next

SCALE = ".scale"  # of a tensor whose values are codes alone
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufFile(GgufHeader):
    """A GGUF file, whose tensors are read one at a time."""

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


JOINT = ".ffn_gate_up_exps."
"""Of a tensor with gate and up of each expert, one behind the other, as in Mistral 4's files."""


class GgufTensors(Tensors):
    """The tensors of a file under their Hugging Face names and in their layout; what has no
    such name keeps its own, so that nothing goes unnoticed."""

    def __init__(self, file: GgufFile, model: HfModel, config: Mapping[str, Any], arch: Arch):
        self.file, self._config, self._arch = file, config, arch
        name_of = NameMap(str(file.meta["general.architecture"]), config["num_hidden_layers"])
        places = {slot.name: name_of(slot.name) for slot in slots_in_file(model)}
        self._halves: dict[str, int] = {}
        for hf, place in places.items():
            places[hf] = self._place(hf, *place)
        self._places = {hf: place for hf, place in places.items() if self._has(*place)}
        self._scales = {
            slot.name: places[slot.name][0].removesuffix(".weight") + SCALE
            for slot in slots_in_file(model)
            if slot.param.ternary
        }
        taken = {name for name, _ in self._places.values()} | {ROPE_FACTORS}
        taken |= set(self._scales.values())
        if file.meta["general.architecture"] == gguf_gemma4.NAME:
            taken |= {name for name in file.tensors if gguf_gemma4.is_unused(name, config)}
        if file.meta.get(f"{file.meta['general.architecture']}.{gguf_further.FURTHER}"):
            layers = int(config["num_hidden_layers"])
            taken |= {name for name in file.tensors if gguf_further.is_of_one(name, layers)}
        self._places |= {name: (name, None) for name in file.tensors if name not in taken}
        super().__init__(self._places)

    def _place(self, hf: str, name: str, part: int | None) -> tuple[str, int | None]:
        """The place of a tensor, in that of gate and up together where a file has them so."""
        for half, input_of in enumerate(("gate", "up")):
            joint = name.replace(f".ffn_{input_of}_exps.", JOINT)
            if joint != name and joint in self.file.tensors:
                self._halves[hf] = half
                return joint, part
        return name, part

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
        shape = (shape[0] // 2, *shape[1:]) if name in self._halves else shape
        return dtype, gguf_hybrid.shape_of(name, shape)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.file.read(*self._places[name])
        if (half := self._halves.get(name)) is not None:
            array = np.split(array, 2)[half]
        if name in self._scales:
            scale, known = self._scales[name], self._scales[name] in self.file.tensors
            array = floats_of_values(array, self.file.read(scale) if known else None, name)
        array = in_order(name, array, self._config, self._arch, into=False)
        if shift := self._arch.shift_of(name):
            array = array.astype(np.float32) - shift
        return array


CUTS: dict[type, Callable[[Mapping[str, Any]], tuple[Cut, ...]]] = {
    Latent: lambda config: (gguf_deepseek.cut(config),),
    Qwen3Next: lambda config: (gguf_hybrid.cut(config),),
    HybridGranite: gguf_mamba.cuts,
    GraniteExperts: gguf_mamba.cuts,
}
"""Matrices that are cut in GGUF, by family and config.json."""


def is_headless(model: HfModel) -> bool:
    """True for an encoder, whose head GGUF files leave out."""
    return model.both_ways and not model.fills_masks


def slots_in_file(model: HfModel) -> list[Slot]:
    """The tensors of the Hugging Face checkpoint that a GGUF file holds: of an encoder all but its
    head."""
    head = dict(walk(model.head_weights(model.spec()))) if is_headless(model) else {}
    own = {path for path, param in head.items() if param.inputs != ("vocab",)}
    every = [
        slot for slot in slots(model)
        if slot.path not in own and not gguf_apertus.is_metadata(slot.name)
    ]  # fmt: skip
    return in_parts(cuts_of(model), every)


def cuts_of(model: HfModel) -> tuple[Cut, ...]:
    """Cuts of those of a model's matrices that GGUF has in parts."""
    for kind, cuts in CUTS.items():
        if isinstance(model, kind):
            return cuts(model.hf.config(model))
    return ()


def refuse_blocks(model: HfModel, field: str, dtype: str = "q4_0") -> None:
    """Raises UserError for a model that no GGUF file holds in blocks of this type; `field` asks for
    that."""
    try:
        gguf_arch_of(model.hf.config(model))
    except UserError as error:
        raise error.at(field) from error
    if cuts_of(model):
        raise UserError(
            f"{field}: {dtype} is not written for a {model.kind!r} model, some of whose matrices "
            "GGUF holds in parts; use int4 and a folder"
        )
    if gguf_falcon.has_multipliers(model):
        raise UserError(
            f"{field}: {dtype} is not written for a {model.kind!r} model, whose multipliers GGUF "
            "has in the weights; use int4 and a folder"
        )
    metadata_of(model.hf.config(model), field)


def open_gguf(path: Path) -> tuple[GgufFile, Any, Tensors]:
    """(file, model, tensors by Hugging Face name) of a GGUF file; nothing is read yet."""
    from lmwright.formats.hf_read import model_from_config

    file = GgufFile(path)
    config = config_of(file.meta, {name: file.shape(name) for name in file.tensors}, str(path))
    name, arch = arch_of(file.meta, file.tensors, str(path))
    if ROPE_FACTORS in file.tensors and not arch.factors:
        raise UserError(
            f"{path}: holds {ROPE_FACTORS}, which llama.cpp's {name} does not compute with; "
            "download another conversion of the model"
        )
    if ROPE_FACTORS in file.tensors:
        take = proportional_rope if name == gguf_gemma4.NAME else llama3_rope
        take(config, file.read(ROPE_FACTORS), str(path))
    missing = [k for k in ("num_hidden_layers", "hidden_size") if not config.get(k)]
    if missing:
        raise UserError(f"{path}: its metadata lack {', '.join(missing)}; download it again")
    model = model_from_config(config, str(path))
    tensors: Tensors = GgufTensors(file, model, config, arch)
    if name == gguf_apertus.NAME:
        tensors = gguf_apertus.WithNumbers(tensors, file.meta, slots(model), str(path))
    cuts = cuts_of(model)
    return file, model, Apart(tensors, cuts) if cuts else tensors


def open_written(path: Path) -> tuple[GgufFile, Any, Tensors]:
    """`open_gguf` of a file that was just written. Raises UserError where what it says would be
    refused, whoever reads it."""
    try:
        return open_gguf(path)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ").partition("; ")[0]
        raise UserError(
            f"model: cannot be expressed in a GGUF file, whose reader would refuse it ({reason}); "
            "export to a Hugging Face folder instead"
        ) from error
