"""Rows and examples that cannot be used: each part of a stage sets its own aside, and the end of
the stage gathers them."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmwright.data.manifest import total
from lmwright.data.rows.lengths import cure, histogram_of, none_left
from lmwright.errors import UserError
from lmwright.guard.files import write_whole

QUARANTINE = "quarantine.jsonl"
REASONS_SHOWN = 3
ROWS_COMPARED = 1000  # of which one is shown for each reason


def bad_file(number: int) -> str:
    """Path of a part's bad examples in the folder of the stage."""
    return f"bad/part-{number:05d}.jsonl"


class BadWriter:
    """Writes bad examples as JSON lines; no file if there are none."""

    def __init__(self, path: Path):
        self.path, self.file = path, None

    def write(self, entry: dict[str, Any]) -> None:
        if self.file is None:
            self.path.parent.mkdir()
            self.file = self.path.open("w", encoding="utf-8")
        self.file.write(json.dumps(entry) + "\n")

    def __enter__(self) -> "BadWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.file is not None:
            self.file.close()


def gather_bad(folder: Path, parts: Iterable[int], temp: Path) -> None:
    """Puts the bad rows of the parts of a stage into quarantine.jsonl in `temp`."""
    with open(temp / QUARANTINE, "wb") as out:
        for path in (folder / bad_file(number) for number in parts):
            if path.exists():
                out.write(path.read_bytes())


def read_bad(quarantine: Path) -> Iterator[dict[str, Any]]:
    """Entries of a quarantine.jsonl."""
    with open(quarantine, encoding="utf-8") as f:
        yield from map(json.loads, f)


def first_reasons(quarantine: Path, place: Callable[[dict[str, Any]], str]) -> str:
    """The first reasons that differ, each with the `place` of a row, as text."""
    first: dict[str, str] = {}
    for entry in itertools.islice(read_bad(quarantine), ROWS_COMPARED):
        first.setdefault(entry["reason"], place(entry))
    shown = itertools.islice(first.items(), REASONS_SHOWN)
    return "; ".join(f"{where} {reason}" for reason, where in shown)


def gather_bad_examples(
    folder: Path, counts: Sequence[dict[str, Any]], temp: Path, limit: float
) -> dict[str, Any]:
    """Puts the bad examples of all parts into quarantine.jsonl in `temp`; returns no facts.

    Raises UserError if they are more than `limit` of all examples or nothing else is left.
    """
    gather_bad(folder, range(len(counts)), temp)
    sums = {key: sum(total(c, key) for c in counts) for key in ("docs", "bad", "too_long")}
    first = first_reasons(temp / QUARANTINE, lambda entry: f"{entry['id']}:")
    examples = sum(sums.values())
    if sums["bad"] > limit * examples:
        write_whole(folder / QUARANTINE, (temp / QUARANTINE).read_bytes())
        raise UserError(
            f"{sums['bad']} of {examples} examples cannot be used, more than "
            f"data.normalize.max_bad_fraction={limit:g} allows; they are listed in "
            f"{folder / QUARANTINE}; the first: {first}; correct the input or raise the fraction"
        )
    if not sums["docs"] and sums["too_long"]:
        raise UserError(
            f"{folder.parent}: no example is left; {sums['too_long']} are longer than a row; "
            f"{cure(histogram_of(counts))}, and data.chat.too_long cuts them"
        )
    if not sums["docs"] and not sums["bad"]:
        other = int(sum(total(count, "other_length") for count in counts))
        raise UserError(f"{folder.parent}: no example is left; {none_left(other)}")
    if not sums["docs"]:
        raise UserError(f"{folder.parent}: no example is left; the first: {first}")
    return {}
