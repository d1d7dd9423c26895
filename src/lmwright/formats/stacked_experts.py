"""Experts as gpt-oss's files hold them, under the names of each alone, and back.

    X.gate_up_proj        [E, in, 2 F]             gate and up in turn: g0 u0 g1 u1 ...
    X.gate_up_proj_bias   [E, 2 F]
    X.down_proj           [E, F, out]
    X.down_proj_bias      [E, out]
    X.down_proj_blocks    uint8 [E, out, F / 32, 16]   as released: MXFP4, two values a byte, the
    X.down_proj_scales    uint8 [E, out, F / 32]       first at the low bits; 2^(scale - 127) of 32

Llama 4's have all of the gate before all of up in these columns. Gemma 4's are [E, 2 F, in], also
one behind the other, and [E, out, F]; they are read as other fused tensors are
(`formats.fused_tensors`).

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors, described
from lmwright.formats.transposed import transposed

OWN = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj"
                 r"\.(?P<kind>weight|bias)")  # fmt: skip
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
SOURCES = {part: (name, at, len(parts)) for name, parts in PARTS.items()
           for at, part in enumerate(parts)}  # fmt: skip
BLOCK = 32  # values that share a scale
BIAS_OF_SCALES = 127
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array((*NUMBERS, *(-number for number in NUMBERS)), ml_dtypes.bfloat16)
"""Of the 16 codes of a value of four bits."""


@dataclass(frozen=True)
class _Part:
    """One expert's part of a stacked tensor."""

    source: str
    """Name without the ending of blocks or scales."""
    expert: int
    rows: slice
    """Its outputs."""
    bias: bool
    packed: bool


class UnstackedExperts(Tensors):
    """The tensors of a folder, those of experts by the names of each. A stacked one is read when a
    part of it is asked for, and kept until another is. Raises UserError where blocks and scales do
    not agree."""

    def __init__(self, stored: Mapping[str, np.ndarray], where: str, order: str = "turns"):
        self._stored, self._where, self._order = stored, where, order
        self.not_taken = getattr(stored, "not_taken", ())
        self._read: tuple[str, tuple[np.ndarray, ...]] = "", ()
        self._parts: dict[str, _Part] = {}
        alone = [name for name in stored if not self._takes(name)]
        super().__init__({*alone, *self._parts})

    def _takes(self, name: str) -> bool:
        """Notes the parts of a stacked tensor; False for another one."""
        base, packed = name.removesuffix("_blocks"), name.endswith("_blocks")
        scales = base.removesuffix("_scales")
        if scales != base and f"{scales}_blocks" in self._stored:
            return True
        stem, _, last = base.rpartition(".")
        bias, kind = last.endswith("_bias"), last.removesuffix("_bias")
        if not stem.endswith(".experts") or kind not in PARTS:
            return False
        parts, shape = PARTS[kind], described(self._stored, name)[1]
        self._refuse_disagreement(base, shape, packed, bias)
        for at, part in enumerate(parts):
            for expert in range(shape[0]):
                own = f"{stem}.{expert}.{part}_proj.{'bias' if bias else 'weight'}"
                rows = self._rows(at, len(parts), shape[1] if packed else shape[-1])
                self._parts[own] = _Part(base, expert, rows, bias, packed)
        return True

    def _rows(self, at: int, count: int, outputs: int) -> slice:
        """The outputs of a part: each of so many in turn, or a stretch of them."""
        if self._order == "turns":
            return slice(at, None, count)
        return slice(at * outputs // count, (at + 1) * outputs // count)

    def _refuse_disagreement(
        self, base: str, shape: tuple[int, ...], packed: bool, bias: bool
    ) -> None:
        if not packed and len(shape) == (2 if bias else 3):
            return
        if packed and f"{base}_scales" in self._stored:
            kinds = [described(self._stored, f"{base}_{end}") for end in ("blocks", "scales")]
            (codes, of_codes), (scales, of_scales) = kinds
            whole = len(shape) == 4 and of_codes[3] == BLOCK // 2 and of_codes[:3] == of_scales
            if whole and codes == scales == "uint8":
                return
        raise UserError(
            f"{self._where}: {base} does not have the shape of all experts of a layer, or its "
            "scales do not fit its blocks; download the folder again"
        )

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        if (part := self._parts.get(name)) is None:
            return described(self._stored, name)
        ending = "_blocks" if part.packed else ""
        dtype, shape = described(self._stored, f"{part.source}{ending}")
        if part.packed:
            rows, width = shape[1], shape[2] * BLOCK
            return "bfloat16", (len(range(rows)[part.rows]), width)
        outputs = len(range(shape[-1])[part.rows])
        return dtype, (outputs,) if part.bias else (outputs, shape[1])

    def __getitem__(self, name: str) -> np.ndarray:
        if (part := self._parts.get(name)) is None:
            return self._stored[name]
        if self._read[0] != part.source:
            endings = ("_blocks", "_scales") if part.packed else ("",)
            self._read = "", ()  # lets the last one go first
            self._read = part.source, tuple(self._stored[f"{part.source}{e}"] for e in endings)
        arrays = [array[part.expert] for array in self._read[1]]
        if part.packed:
            return unpacked(*(array[part.rows] for array in arrays))
        if part.bias:
            return np.ascontiguousarray(arrays[0][part.rows])
        return transposed(np.ascontiguousarray(arrays[0][:, part.rows]))


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 [rows, width] of MXFP4 blocks uint8 [rows, width / 32, 16] and scales uint8 [rows,
    width / 32]; every value is exact."""
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS_OF_SCALES)
    values = VALUES.astype(np.float32)[codes] * factors[..., None]
    return values.astype(ml_dtypes.bfloat16).reshape(scales.shape[0], -1)


def stacked_name(name: str) -> str | None:
    """Name of the stacked tensor that holds a tensor by this name; None if it stands alone."""
    if (match := OWN.fullmatch(name)) is None:
        return None
    source, _, _ = SOURCES[match["part"]]
    return f"{match['layer']}.{source}{'_bias' if match['kind'] == 'bias' else ''}"


def in_files(name: str, ends: Mapping[str, str]) -> str:
    """Name in a folder of a tensor of transformers' class, where `ends` of names differ."""
    end = next((end for end in ends if name.endswith(end)), "")
    return name.removesuffix(end) + ends.get(end, "")


def stacked_sizes(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors of a folder, from those by the names of each expert."""
    found: dict[str, int] = {}
    for name, size in sizes:
        whole = stacked_name(name) or name
        found[whole] = found.get(whole, 0) + size
    return list(found.items())


def stacked(
    tensors: Iterable[tuple[str, np.ndarray]], *, order: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a folder, in the order of `stacked_sizes`, from those by the names of each
    expert, in the order of their layers: in this order (`Table.stacked_experts`)."""
    held: dict[str, dict[tuple[str, int], np.ndarray]] = {}
    layer = ""
    for name, array in tensors:
        match = OWN.fullmatch(name)
        if held and (match is None or match["layer"] != layer):
            yield from _joined(held, order)
            held = {}
        if match is None:
            yield name, array
            continue
        layer = match["layer"]
        whole = held.setdefault(stacked_name(name) or name, {})
        whole[match["part"], int(match["expert"])] = array
    yield from _joined(held, order)


def _joined(
    held: dict[str, dict[tuple[str, int], np.ndarray]], order: str
) -> Iterator[tuple[str, np.ndarray]]:
    for name, parts in held.items():
        kinds = PARTS[name.rpartition(".")[2].removesuffix("_bias")]
        experts = range(len(parts) // len(kinds))
        first = next(iter(parts.values()))
        outputs, inputs = first.shape[0], first.shape[1:]
        rows = outputs * len(kinds)
        as_rows = order == "halves"
        shape = (len(experts), rows, *inputs) if as_rows else (len(experts), *inputs, rows)
        result = np.empty(shape, first.dtype)
        for (part, expert), array in parts.items():
            _, at, count = SOURCES[part]
            stretch = slice(at * outputs, (at + 1) * outputs)
            if as_rows:
                result[expert][stretch] = array
            else:
                result[expert][..., slice(at, None, count) if order == "turns" else stretch] = (
                    array.T
                )
        yield name, result
        parts.clear()
