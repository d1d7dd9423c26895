"""HLO: the compiler's optimized, scheduled program as objects, with the trips of its loops.

    text --parse--> Program{name: Computation[Instruction]}    --trip_count--> body runs n times

Only what costing needs is read: shapes, operands, called computations, and the compiler's own
estimate of a fusion's cycles.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from lmwright.nn.exchange import SCOPE

BITS = {
    "pred": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "s4": 4,
    "u4": 4,
    "token": 0,
} | {f"{s}{n}": n for s in "su" for n in (8, 16, 32, 64)}

_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{\s*$")
_NAME = re.compile(r"^(?:ROOT )?%(\S+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_PLACED = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|branch_computations)=\{?(%[^,}]*(?:, %[^,}]*)*)"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN = 2**63 - 1  # cycles, as the compiler writes that it does not know them
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str = field(repr=False)
    """Attributes, as text."""
    argument: str = ""
    """Text between the parentheses."""
    is_root: bool = False

    @property
    def cycles(self) -> int | None:
        """The compiler's own estimate of cycles; None where it gives none."""
        match = _CYCLES.search(self.rest)
        cycles = int(match[1]) if match else UNKNOWN
        return None if cycles == UNKNOWN else cycles

    @property
    def op_name(self) -> str:
        """The path through our own code, as JAX names it."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this one runs."""
        return tuple(n for group in _CALLED.findall(self.rest) for n in _OPERAND.findall(group))

    @property
    def nbytes(self) -> int:
        """Bytes of the result; of all parts where it is a tuple."""
        return sum(math.prod(dims) * bits // 8 for bits, dims in arrays(self.shape))

    def attribute(self, key: str) -> str | None:
        """The text of `key=...`: a word, or what stands in braces."""
        match = re.search(rf"\b{key}=(\{{[^}}]*\}}|\[[^\]]*\]|[^,\s]+)", self.rest)
        return match[1] if match else None

    def callee(self, key: str) -> str:
        """Name of the computation in `key=%name`."""
        return self.attribute(key).lstrip("%")


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)


@dataclass(frozen=True)
class Program:
    """All computations of a module."""

    computations: dict[str, Computation]
    entry: str
    text: str = field(default="", repr=False)
    """The whole text; tables at its top say where instructions come from."""

    def trip_count(self, loop: Instruction, holder: Computation) -> int | None:
        """Number of iterations of a `while` in `holder`; None if unknown.

        Understood is the loop that counts: an element of its tuple that starts as a
        constant, grows by a constant, and is compared with a constant. How often experts exchange
        rows depends on the data; their loop says what is usual.
        """
        if rounds := SCOPE.search(loop.op_name):
            return int(rounds[1])
        condition = self.computations[loop.callee("condition")]
        body = self.computations[loop.callee("body")]
        test = condition.root
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        counter, limit = (condition.by_name[name] for name in test.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return None
        index = int(counter.attribute("index"))
        start = _constant(holder, _element(holder, loop.operands[0], index))
        step = _step(body, body.root.operands[index])
        if start is None or not step:
            return None
        return max(0, math.ceil((int(limit.argument) - start) / step))


def usual_share(step: Instruction) -> float:
    """Share of the rows in a round of experts that usually are there; 1 elsewhere."""
    rounds = SCOPE.search(step.op_name)
    return int(rounds[2]) / 100 if rounds else 1.0


def arrays(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """(bits of an element, sizes) of every array in a shape's text."""
    operands = []
    for kind, sizes in _ARRAY.findall(shape):
        if kind in BITS:
            operands.append((BITS[kind], tuple(int(s) for s in sizes.split(",") if s)))
    return operands


def memory_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape that lie in the chip's main memory, not in a nearer one
    (`S(1)` and so on in the layout)."""
    far = (text for text in _PLACED.findall(shape) if "S(" not in text)
    return sum(math.prod(dims) * bits // 8 for text in far for bits, dims in arrays(text))


def placed_arrays(shape: str) -> list[tuple[str, int]]:
    """(text with layout, bytes) of the arrays of a shape that have dimensions."""
    texts = [text for text in _PLACED.findall(shape) if "[]" not in text]
    sizes = [math.prod(dims) * bits // 8 for text in texts for bits, dims in arrays(text)]
    return list(zip(texts, sizes, strict=True))


def parse(text: str) -> Program:
    """The program of a module's text. Raises ValueError where there is no entry."""
    computations, entry = {}, None
    name, lines = None, []
    for line in _joined(text):
        header = _HEADER.match(line)
        if header and " = " not in line.split("(")[0]:
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif name and (step := _instruction(line.strip())):
            lines.append(step)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: is it an HLO module?")
    return Program(computations, entry, text)


def _joined(text: str) -> Iterator[str]:
    """Lines of the text, with a kernel's metadata, which spans several, put back on its own
    line."""
    pending = ""
    for line in text.splitlines():
        pending = f"{pending} {line}" if pending else line
        if "}}" in pending.rpartition("kernel_metadata={")[2] or "kernel_metadata={" not in pending:
            yield pending
            pending = ""


def _instruction(line: str) -> Instruction | None:
    head = _NAME.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest.partition("(")[0]
    close = _closing(rest, len(opcode))
    argument = rest[len(opcode) + 1 : close]
    return Instruction(
        name=head[1], opcode=opcode, shape=shape, operands=tuple(_OPERAND.findall(argument)),
        argument=argument, rest=rest[close + 1 :], is_root=line.startswith("ROOT "),
    )  # fmt: skip


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def _element(holder: Computation, name: str, index: int) -> str | None:
    """Name of what element `index` of the tuple `name` is made of."""
    made = holder.by_name[name]
    return made.operands[index] if made.opcode == "tuple" else None


def _constant(holder: Computation, name: str | None) -> int | None:
    """The integer that `name` holds, seen through copies."""
    while name is not None:
        step = holder.by_name[name]
        if step.opcode == "constant":
            return int(step.argument) if re.fullmatch(r"-?\d+", step.argument) else None
        name = step.operands[0] if step.opcode in ("copy", "bitcast", "convert") else None
    return None


def _step(body: Computation, name: str) -> int | None:
    """Increment of the loop counter per iteration."""
    grown = body.by_name[name]
    while grown.opcode in ("copy", "bitcast"):
        grown = body.by_name[grown.operands[0]]
    if grown.opcode != "add":
        return None
    steps = [_constant(body, operand) for operand in grown.operands]
    known = [step for step in steps if step is not None]
    return known[0] if len(known) == 1 else None
