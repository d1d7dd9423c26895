"""Pattern: layers of several kinds, cut into spans in which a short pattern of them repeats.

    kinds of the layers      d  m  m  m  m  m         l l l l l g  l l l l l g  l l
                             |  +-----v-----+         +-----v----------------+  +v+
    spans                    |  m, 5 times            (l l l l l g), twice      l, twice
                             d, once

Weights of a span are stacked on axis 0, one stack for each place in its pattern, so that a
compiler sees every place once however many layers there are. The span that holds the most
layers is called `layers`, another `layers_from_N` by its first layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

LAYERS = "layers"
LONGEST_PATTERN = 16


@dataclass(frozen=True)
class Span:
    """Layers `first`, `first` + 1, ... with `kinds` repeating `repeats` times."""

    name: str
    kinds: tuple[str, ...]
    repeats: int
    first: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.repeats

    def places(self) -> Iterator[tuple[str, str, range]]:
        """(path of the stack in the weights, kind, numbers of its layers) by place."""
        for i, kind in enumerate(self.kinds):
            path = f"{self.name}.{i}" if len(self.kinds) > 1 else self.name
            start = self.first + i
            yield path, kind, range(start, start + self.num_layers, len(self.kinds))


@cache
def spans(kinds: tuple[str, ...]) -> tuple[Span, ...]:
    """The spans of layers of these kinds in order, with as few places in all as can be."""
    cuts = min(_cuts(kinds), key=lambda cuts: sum(len(pattern) for pattern, _ in cuts))
    most = max(range(len(cuts)), key=lambda i: len(cuts[i][0]) * cuts[i][1])
    result, first = [], 0
    for i, (pattern, repeats) in enumerate(cuts):
        name = LAYERS if i == most else f"{LAYERS}_from_{first}"
        result.append(Span(name, pattern, repeats, first))
        first += len(pattern) * repeats
    return tuple(result)


Cuts = list[tuple[tuple[str, ...], int]]


def _cuts(kinds: tuple[str, ...]) -> Iterator[Cuts]:
    """Ways to cut: runs of one kind, a repeated pattern, runs of one kind."""
    yield _runs(kinds)
    for start in range(len(kinds)):
        for length in range(1, min(LONGEST_PATTERN, len(kinds) - start) + 1):
            pattern = kinds[start : start + length]
            end = start
            while kinds[end : end + length] == pattern:
                end += length
            if end > start + length:
                repeats = (end - start) // length
                yield [*_runs(kinds[:start]), (pattern, repeats), *_runs(kinds[end:])]


def _runs(kinds: Sequence[str]) -> Cuts:
    runs: Cuts = []
    for kind in kinds:
        if runs and runs[-1][0] == (kind,):
            runs[-1] = ((kind,), runs[-1][1] + 1)
        else:
            runs.append(((kind,), 1))
    return runs
