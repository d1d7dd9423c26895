"""Arrays of a compiled program that int32 does not count."""

import math
import re
from collections.abc import Iterator

from tests.aot.programs import instructions

LIMIT = 2**31
HOST = "S(5)"  # of a layout: the memory of the host
# what may be done with such an array on the host: to hold it, and to move a layer of it
MOVED = {
    "parameter", "tuple", "get-tuple-element", "while", "custom-call", "opt-barrier", "bitcast",
    "dynamic-slice-start", "dynamic-update-slice-start", "dynamic-update-slice-done",
}  # fmt: skip
_ARRAY = re.compile(r"\b(?:pred|bf16|c64|[suf]\d+\w*)\[([\d,]*)\](\{[^}]*\})?")


def arrays(hlo: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(opcode, dimensions, whether on the host) of every array that an instruction makes."""
    for opcode, shape in instructions(hlo):
        for match in _ARRAY.finditer(shape):
            yield (
                opcode,
                tuple(map(int, filter(None, match[1].split(",")))),
                HOST in (match[2] or ""),
            )


def too_large(hlo: str) -> set[tuple[str, tuple[int, ...], bool]]:
    """Those `arrays` that have 2^31 elements or more."""
    return {each for each in arrays(hlo) if math.prod(each[1]) >= LIMIT}


def widest(hlo: str) -> int:
    """The largest dimension of any array: how far an index along one axis has to count."""
    return max((max(dims, default=1) for _, dims, _ in arrays(hlo)), default=0)
