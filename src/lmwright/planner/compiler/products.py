"""Products in a program: how many FLOPs they are, and what they need of the matrix units, which
multiply int8 at twice the rate of bfloat16 on some chips."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmwright.planner.compiler.hlo import Computation, Instruction, Program, arrays
from lmwright.planner.compiler.kernel_cost import ragged_flops

MATMULS = {"convolution", "dot"}


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
    """2 m k n of a matmul without batch dimensions: m k, k n and m n are the sizes of its
    operands and its result."""
    sizes = [_elements(holder.by_name[name].shape) for name in step.operands[:2]]
    return 2 * math.sqrt(math.prod(sizes) * _elements(step.shape))


def _is_int8(step: Instruction, holder: Computation) -> bool:
    return all(holder.by_name[name].shape.startswith("s8[") for name in step.operands[:2])


def _elements(shape: str) -> int:
    return sum(math.prod(dims) for _, dims in arrays(shape))
