"""evals.jsonl: what `lmwright eval` measured of a run's checkpoints beside its losses.

    {"kind": "positions", "step", "time", "source", "starts", "stops", "losses", "tokens"}
    {"kind": "needle", "step", "time", "source", "lengths", "depths", "found", "tries", "seed"}
    {"kind": "task", "step", "time", "source", "shots", "chat", "questions", "scores", "errors"}

Training never writes it. A measurement that is made again replaces the earlier one.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from lmwright.errors import UserError
from lmwright.guard.temporary import write_output
from lmwright.storage.bucket import Bucket, Changed
from lmwright.storage.mirror import shown, url_of

EVALS_FILE = "evals.jsonl"
KEYS = ("kind", "step", "source", "adapter", "shots", "chat")  # of these, the newest line counts

ATTEMPTS = 10

Line = dict[str, Any]


def keep_measured(run_dir: Path, step: int, lines: Iterable[Line], adapter: str | None) -> None:
    """Adds lines to the file of a run directory, or of the bucket that it mirrors. Raises UserError
    where the file is damaged or cannot be written."""
    stamp = {"step": step, "time": time.time()} | ({"adapter": adapter} if adapter else {})
    new = [stamp | line for line in lines]
    try:
        with _locked(run_dir):
            if url := url_of(run_dir):
                _keep_in_bucket(Bucket(url), new)
            else:
                merged = _merged(read_measured(run_dir), new)
                write_output(run_dir / EVALS_FILE, merged)
    except OSError as error:
        raise UserError(
            f"{shown(run_dir)}/{EVALS_FILE}: cannot be written ({error.strerror}); make the folder "
            "writable, or evaluate a copy of it"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one command at a time change the file, of those on this machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _keep_in_bucket(bucket: Bucket, new: Sequence[Line]) -> None:
    """Adds lines to the file as it is there now: others may have written it meanwhile."""
    for _ in range(ATTEMPTS):
        there = bucket.read(EVALS_FILE)
        text = there[0].decode(errors="replace") if there else ""
        before = _parsed(text, f"{bucket.url}/{EVALS_FILE}")
        with suppress(Changed):
            bucket.write(EVALS_FILE, _merged(before, new), there[1].generation if there else 0)
            return
    raise UserError(f"{bucket.url}/{EVALS_FILE}: changes faster than it can be written; try again")


def _merged(before: Sequence[Line], new: Sequence[Line]) -> str:
    kept = {_key(line): line for line in (*before, *new)}
    return "".join(json.dumps(line) + "\n" for line in kept.values())


def read_measured(run_dir: Path) -> list[Line]:
    """Lines of the file, oldest first; none where there is no file. Raises UserError naming the
    line that is damaged."""
    file = run_dir / EVALS_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}; remove it and evaluate again") from error
    return _parsed(text, str(file))


def _parsed(text: str, file: str) -> list[Line]:
    lines = []
    for number, content in enumerate(text.splitlines(), 1):
        try:
            lines.append(_checked(json.loads(content)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"{file}, line {number}: damaged ({error!r}); remove that line and evaluate again"
            ) from error
    return lines


def between(start: int, stop: int) -> str:
    """Text for a bucket of positions, such as "16 to 31"."""
    return f"{start:,}" if stop == start + 1 else f"{start:,} to {stop - 1:,}"


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in KEYS)


def _checked(line: Line) -> Line:
    """The line, if it holds what the report draws. Raises ValueError, TypeError or KeyError."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    if not isinstance(line["source"], str) or not isinstance(line["step"], int):
        raise ValueError("no source or step")
    if line["kind"] == "positions":
        sizes = {len(line[name]) for name in ("starts", "stops", "losses", "tokens")}
        numbers = [*line["starts"], *line["stops"], *line["losses"]]
        good = len(sizes) == 1 and min(line["starts"], default=1) > 0
    elif line["kind"] == "needle":
        numbers = [*line["lengths"], *line["depths"], line["tries"], *chain(*line["found"])]
        good = line["tries"] > 0 and [len(row) for row in line["found"]] == [
            len(line["depths"])
        ] * len(line["lengths"])
    elif line["kind"] == "task":
        numbers, good = [line["shots"], line["questions"], *line["scores"].values()], True
    else:
        raise ValueError(f"kind {line['kind']!r} is unknown")
    if not good or not all(math.isfinite(number) for number in numbers):
        raise ValueError("numbers that cannot be drawn")
    return line
