"""Peak: what is alive at the fullest moment of the compiled step, by what it is for.

The program is walked in its order; an array of HBM lives from the instruction that makes it to
the last that reads it, through tuples, loops and updates in place. A stack that a loop fills
forward is a saved activation, one that it fills backward a gradient, as is what has the shape
of a weight and comes from the backward pass. The rest is temporary. How the compiler reuses
memory is its own: the shares are of this account, the sum is the compiler's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lmwright.planner.compiler.buffers import ELSEWHERE, HBM_ARRAY, filled_by, padded_bytes
from lmwright.planner.compiler.hlo import Computation, Instruction, Program, arrays
from lmwright.planner.compiler.parts import read_frames

SAVED, GRADIENTS, TEMPORARIES = "saved activations", "gradients", "temporaries"
_PASSED_ON = {"bitcast", "opt-barrier", "after-all", "while"}

Value = frozenset | list
"""Names of the instructions that made a value's arrays; a list of values where it is a tuple."""


def peak_split(program: Program) -> dict[str, int]:
    """Bytes of gradients, saved activations and temporaries alive at once at the fullest
    moment, weights and optimizer not counted."""
    walk = Walk(program)
    alive = walk.fullest(program.computations[program.entry])
    split = dict.fromkeys((GRADIENTS, SAVED, TEMPORARIES), 0)
    for name in alive:
        split[walk.use_of(name)] += walk.sizes[name]
    return split


@dataclass
class Walk:
    """One pass over a program, in its order."""

    program: Program
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by the name of the instruction that made them."""
    made: dict[str, Instruction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stacks = filled_by(self.program, read_frames(self.program.text))
        entry = self.program.computations[self.program.entry]
        given = [i for i in entry.instructions if i.opcode == "parameter"]
        self.weights = {dims for i in given for _, dims in arrays(i.shape) if len(dims) > 1}

    def last_reads(self, computation: Computation) -> dict[str, int]:
        """The number of the last instruction of a computation that reads an array, by its name; one
        more than there are where the array is handed on."""
        values: dict[str, Value] = {}
        last: dict[str, int] = {}
        for at, step in enumerate(computation.instructions):
            values[step.name] = self._value(step, values)
            read = [values.get(name, frozenset()) for name in step.operands]
            if step.opcode == "get-tuple-element":  # of a tuple, one part is read
                read = [values[step.name]]
            for value in read:
                last |= dict.fromkeys(names_in(value), at)
        result = list(names_in(values[computation.root.name]))
        last |= dict.fromkeys(result, len(computation.instructions))
        if computation.name == self.program.entry:  # the new state takes the place of the old
            self.sizes |= dict.fromkeys(result, 0)
        return last

    def fullest(self, computation: Computation) -> frozenset[str]:
        """Arrays alive at the fullest moment of a computation, of those made in it."""
        steps, last = computation.instructions, self.last_reads(computation)
        best, most, alive = frozenset(), -1, set()
        for at, step in enumerate(steps):
            if step.name in self.made:
                alive.add(step.name)
            inside = self._inside(step)
            total = sum(map(self.sizes.__getitem__, alive)) + self._total(inside)
            if total > most:
                best, most = inside | alive, total
            alive = {name for name in alive if last.get(name, at) > at}
        return frozenset(best)

    def _total(self, names: frozenset[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def _inside(self, step: Instruction) -> frozenset[str]:
        if step.opcode == "while":
            return self.fullest(self.program.computations[step.callee("body")])
        if step.opcode in ("call", "conditional"):
            inside = [self.fullest(self.program.computations[name]) for name in step.called]
            return max(inside, key=self._total)
        return frozenset()

    def _value(self, step: Instruction, values: dict[str, Value]) -> Value:
        """Arrays that make up a step's result; new ones are recorded in `sizes` and `made`."""
        given = [values.get(name, frozenset()) for name in step.operands]
        if step.opcode == "parameter":
            return frozenset()
        if step.opcode == "tuple":
            return given
        if step.opcode == "get-tuple-element":
            index = int(step.attribute("index"))
            return given[0][index] if isinstance(given[0], list) else given[0]
        if step.opcode in _PASSED_ON or step.opcode.endswith("-done"):
            return given[0] if given else frozenset()
        texts = [t for t in HBM_ARRAY.findall(step.shape) if not ELSEWHERE.search(t)]
        size = sum(map(padded_bytes, texts))
        old: frozenset[str] = frozenset()
        if "dynamic-update-slice" in step.name + step.opcode and texts:  # in place of the largest
            old = frozenset(names_in(given))
            size -= max(map(padded_bytes, texts))
        if step.opcode.endswith("-start"):  # its result holds its operands as well
            size -= self._total(frozenset(names_in(given)))
        if size <= 0:
            return old
        self.sizes[step.name], self.made[step.name] = size, step
        return old | {step.name}

    def use_of(self, name: str) -> str:
        """Purpose of an array."""
        stack = self.stacks.get(name)
        if stack:
            return GRADIENTS if stack.startswith("gradients") else SAVED
        step = self.made[name]
        if {dims for _, dims in arrays(step.shape)} & self.weights:
            whole = any(bits == 32 for bits, _ in arrays(step.shape))  # not a weight that was cast
            if whole or "transpose(" in step.op_name:
                return GRADIENTS
        return TEMPORARIES


def names_in(value: Value) -> Iterator[str]:
    """Names in a value and in the tuples that it is made of."""
    if isinstance(value, frozenset):
        yield from value
    else:
        for item in value:
            yield from names_in(item)
