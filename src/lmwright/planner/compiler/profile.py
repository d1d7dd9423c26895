"""The seconds of a profile by part of the model.

RUN/profile --report.profile--> seconds of each instruction of the train step
the compiled step's text  --parts--> part of each instruction
"""

from collections import Counter

from lmwright.planner.compiler.hlo import Program
from lmwright.planner.compiler.parts import OTHER, part_of, read_frames


def by_part(seconds: Counter, program: Program) -> dict[str, float]:
    """Seconds of each part of the model, the largest first."""
    frames = read_frames(program.text)
    parts = {
        step.name: part_of(step, frames)
        for computation in program.computations.values()
        for step in computation.instructions
    }
    sums = Counter()
    for name, value in seconds.items():
        sums[parts.get(name, OTHER)] += value
    return {part: value for part, value in sums.most_common() if value > 0}
