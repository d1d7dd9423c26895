"""Products in a program: how many FLOPs they are, and what they need of the matrix units, which
multiply int8 at twice the rate of bfloat16 on some chips."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmwright.planner.compiler.hlo import Computation, Instruction, Program, arrays
from lmwright.planner.compiler.kernel_cost import ragged_flops

MATMULS = {"convolution", "dot"}
_BATCH = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"\b(size|stride|lhs_dilate)=(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Work:
    """Products of an instruction."""

    flops: float = 0.0
    needed: float = 0.0
    """FLOPs of bfloat16 that take the matrix units as long."""


@dataclass
class Products:
    """Products of a program's instructions on a chip with units for int8, or without."""

    program: Program
    int8_units: bool
    _inside: dict[str, Work] = field(default_factory=dict)

    def of(self, step: Instruction, holder: Computation) -> Work:
        """Those in an instruction and in what it calls."""
        if step.opcode in MATMULS:
            flops = matmul_flops(step, holder)
            return Work(flops, flops / 2 if self.int8_units and _is_int8(step, holder) else flops)
        if step.opcode == "custom-call":
            return Work(*[ragged_flops(step, holder)] * 2)
        return _sum(map(self._called, step.called)) if step.opcode == "fusion" else Work()

    def _called(self, name: str) -> Work:
        if name not in self._inside:
            inner = self.program.computations[name]
            self._inside[name] = _sum(self.of(each, inner) for each in inner.instructions)
        return self._inside[name]


def _sum(works: Iterator[Work]) -> Work:
    each = [*works]
    return Work(sum(w.flops for w in each), sum(w.needed for w in each))


def matmul_flops(step: Instruction, holder: Computation) -> float:
    """2 b m k n of a matmul: b m k, b k n and b m n are the sizes of its operands and its result, b
    that of its batch dimensions."""
    sizes = [_elements(holder.by_name[name].shape) for name in step.operands[:2]]
    return 2 * math.sqrt(math.prod(sizes) * _elements(step.shape) / _batch(step, holder))


def _batch(step: Instruction, holder: Computation) -> int:
    """Size of the batch dimensions. A convolution has them as a window that meets each place of its
    dilated input once, with a stride of one less than there are places."""
    if dims := _BATCH.search(step.rest):
        _, sizes = arrays(holder.by_name[step.operands[0]].shape)[0]
        return math.prod(sizes[int(number)] for number in dims[1].split(",") if number)
    window = {key: numbers.split("x") for key, numbers in _WINDOW.findall(step.rest)}
    dilated = zip(*(window.get(key, ()) for key in ("size", "stride", "lhs_dilate")), strict=False)
    return math.prod(
        int(size)
        for size, stride, dilation in dilated
        if size == dilation and int(stride) == int(size) - 1
    )


def _is_int8(step: Instruction, holder: Computation) -> bool:
    return all(holder.by_name[name].shape.startswith("s8[") for name in step.operands[:2])


def _elements(shape: str) -> int:
    return sum(math.prod(dims) for _, dims in arrays(shape))
