"""Timeline: which arrays of the compiled program are alive when, in its own order.

    program --walk--> lives [from instruction, to instruction] of arrays in HBM --> plan.html

The body of a loop is there once, however often it runs. As `compiler.peak` has it: what the
compiler does with the memory is its own, so that its peak can differ from this account.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmwright.planner.compiler.hlo import Computation, Program
from lmwright.planner.compiler.parts import OTHER, part_of, read_frames
from lmwright.planner.compiler.peak import SAVED, Walk

LEAST_SHARE = 1e-3  # of the fullest moment; smaller arrays are added up, not drawn


@dataclass(frozen=True)
class Life:
    """One array of HBM, from the instruction that makes it to the last that reads it."""

    name: str
    shape: str
    part: str
    """Part of the model, or what is put into it where it is a stack that a loop fills."""
    use: str
    """`saved activations`, `gradients` or `temporaries`."""
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Loop:
    """The instructions that stand for the body of a loop."""

    name: str
    trips: int | None
    """None where the compiler's text does not say."""
    start: int
    end: int


@dataclass
class Timeline:
    """The lives of all arrays of a program."""

    lives: list[Life] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    length: int = 0
    """Number of instructions."""

    @classmethod
    def of(cls, program: Program) -> "Timeline":
        """The timeline of a scheduled program."""
        made = _Recorder(Walk(program))
        made.record(program.computations[program.entry])
        return made.timeline

    def totals(self) -> dict[str, list[int]]:
        """Bytes alive at each instruction, by use."""
        sums: dict[str, list[int]] = {}
        for life in self.lives:
            changes = sums.setdefault(life.use, [0] * (self.length + 1))
            changes[life.start] += life.nbytes
            changes[life.end] -= life.nbytes
        for changes in sums.values():
            for at in range(1, len(changes)):
                changes[at] += changes[at - 1]
        return {use: changes[: self.length] for use, changes in sums.items()}

    @property
    def fullest(self) -> tuple[int, int]:
        """(instruction, bytes) of the fullest moment."""
        sums = [sum(column) for column in zip(*self.totals().values(), strict=True)]
        most = max(sums, default=0)
        return (sums.index(most), most) if sums else (0, 0)

    def drawn(self) -> list[Life]:
        """Arrays that are large enough to be drawn, in the order in which they are made."""
        least = LEAST_SHARE * self.fullest[1]
        return sorted(
            (life for life in self.lives if life.nbytes > least), key=lambda life: life.start
        )


class _Recorder:
    """Numbers the instructions of a program and notes the arrays that they make."""

    def __init__(self, walk: Walk):
        self.walk, self.program, self.timeline = walk, walk.program, Timeline()
        self.frames = read_frames(walk.program.text)

    def record(self, computation: Computation) -> None:
        """Adds the lives of the arrays made in a computation, after what is there already."""
        last = self.walk.last_reads(computation)
        first: list[int] = []  # of each step, the number of its instruction
        after: list[int] = []
        for step in computation.instructions:
            first.append(self.timeline.length)
            self.timeline.length += 1
            if step.opcode == "while":
                self.record(self.program.computations[step.callee("body")])
                trips = self.program.trip_count(step, computation)
                loop = Loop(step.name, trips, first[-1], self.timeline.length)
                self.timeline.loops.append(loop)
            elif step.opcode in ("call", "conditional"):
                self._largest_of([self.program.computations[name] for name in step.called])
            after.append(self.timeline.length)
        after.append(self.timeline.length)
        for at, step in enumerate(computation.instructions):
            if step.name in self.walk.made and self.walk.sizes[step.name] > 0:
                # an array that nothing reads is there while it is made
                self._add(step.name, first[at], after[last.get(step.name, at)])

    def _largest_of(self, branches: Sequence[Computation]) -> None:
        """Records the largest of several branches, of which only one runs."""
        sizes = [sum(map(self.walk.sizes.__getitem__, self.walk.fullest(b))) for b in branches]
        if branches:
            self.record(branches[sizes.index(max(sizes))])

    def _add(self, name: str, start: int, end: int) -> None:
        walk, step = self.walk, self.walk.made[name]
        stack = walk.stacks.get(name)
        part = stack.partition(", ")[2] if stack else part_of(step, self.frames)
        use = walk.use_of(name)
        if part == OTHER and use == SAVED:
            part = "block input"
        shape = step.shape.partition("{")[0].lstrip("(")
        self.timeline.lives.append(Life(name, shape, part, use, walk.sizes[name], start, end))
