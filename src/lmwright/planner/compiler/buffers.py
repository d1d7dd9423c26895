"""Buffers: the largest arrays that the compiled program makes, and what they are for.

They share memory over time, so that they do not add up to the peak. Arrays that live in vector
memory are left out, as is what is updated in place; a stack that a loop fills, row by row, is
named after what is put in.
"""

import math
import re
from dataclasses import dataclass

from lmwright.planner.compiler.hlo import Computation, Instruction, Program, arrays
from lmwright.planner.compiler.parts import OTHER, Frames, part_of, read_frames

HBM_ARRAY = re.compile(r"[a-z]\w*\[[\d,]*\]\{[^}]*\}")
_LAYOUT = re.compile(r"\{([\d,]+):T\((?:(\d+),)?(\d+)\)")
ELSEWHERE = re.compile(r"S\(\d+\)")  # vector, scalar and host memory
_SHARED = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
           "constant", "after-all", "dynamic-update-slice", "opt-barrier"}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """One array of one device."""

    shape: str
    nbytes: int
    """Bytes, with the padding of its tiles."""
    part: str


def largest_buffers(program: Program, count: int = 8) -> list[Buffer]:
    """The `count` largest kinds of arrays (of equal shape and part one is kept)."""
    frames = read_frames(program.text)
    fused = {
        name
        for computation in program.computations.values()
        for step in computation.instructions
        if step.opcode == "fusion"
        for name in step.called
    }
    stacks = filled_by(program, frames)
    buffers: dict[tuple[str, str], Buffer] = {}
    for computation in program.computations.values():
        if computation.name in fused:
            continue
        for step in computation.instructions:
            if step.opcode in _SHARED or "output_to_operand_aliasing" in step.rest:
                continue
            if step.opcode.endswith(("-done", "-start")) or "dynamic-update-slice" in step.name:
                continue  # in place
            part = stacks.get(step.name) or part_of(step, frames)
            for text in HBM_ARRAY.findall(step.shape):
                if not ELSEWHERE.search(text):
                    shape = text.partition("{")[0]
                    buffers.setdefault((shape, part), Buffer(shape, padded_bytes(text), part))
    return sorted(buffers.values(), key=lambda b: -b.nbytes)[:count]


def filled_by(program: Program, frames: Frames) -> dict[str, str]:
    """Names of arrays that a loop fills, with the part of what is put in."""
    buffers = {}
    for computation in program.computations.values():
        for loop in computation.instructions:
            if loop.opcode != "while":
                continue
            made = computation.by_name.get(loop.operands[0])
            root = program.computations[loop.callee("body")].root
            if made is None or made.opcode != "tuple" or root.opcode != "tuple":
                continue
            body = program.computations[loop.callee("body")]
            for outer, inner in zip(made.operands, root.operands, strict=True):
                step = body.by_name[inner]
                if step.opcode == "get-tuple-element":  # the product that also puts its result in
                    step = body.by_name.get(step.operands[0], step)
                if "dynamic-update-slice" in step.name and outer in computation.by_name:
                    buffers[_origin(computation, outer)] = _part_put_in(step, body, frames)
    return buffers


def _origin(holder: Computation, name: str) -> str:
    """Instruction that made an array before it was passed on unchanged."""
    step = holder.by_name[name]
    while step.opcode in ("bitcast", "copy") and step.operands[0] in holder.by_name:
        step = holder.by_name[step.operands[0]]
    return step.name


def _part_put_in(step: Instruction, body: Computation, frames: Frames) -> str:
    """Part that a stack belongs to, by the instruction that made the row put into it."""
    given = [body.by_name[name] for name in step.operands if name in body.by_name]
    parts = [part_of(shape, frames) for shape in given]
    if step.shape.startswith("("):
        parts.insert(0, part_of(step, frames))
    part = next((part for part in parts if part != OTHER), "block input")
    return f"gradients, {part}" if "transpose(" in step.op_name else f"saved, {part}"


def padded_bytes(text: str) -> int:
    """Bytes of an array with its layout, `bf16[8,100]{1,0:T(8,128)(2,1)}`, tiles full."""
    bits, dims = arrays(text)[0]
    layout = _LAYOUT.search(text)
    if not layout or not dims:
        return math.prod(dims) * bits // 8
    sides = list(dims)
    minor = [int(axis) for axis in layout[1].split(",")]
    for axis, tile in zip(minor, (layout[3], layout[2]), strict=False):
        if tile:
            sides[axis] = math.ceil(sides[axis] / int(tile)) * int(tile)
    return math.prod(sides) * bits // 8
