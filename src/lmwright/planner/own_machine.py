"""Own machine: how much slower or faster this user's machine is than predicted, where it is known.

    ~/.cache/lmwright/machines.json  {"cpu:2": {"quick": 1.31, "run": "mine", "date": "..."}, ...}

`lmwright plan --measured RUN --keep` writes it, later predictions for a machine of that name are
multiplied by it and say so, and `--forget` removes it.
"""

import datetime
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from lmwright.data.json_text import parse_json
from lmwright.data.manifest import dump_json
from lmwright.guard.files import write_whole
from lmwright.program.cache import cache_folder


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Measured over predicted seconds of a step, on one machine."""

    quick: float | None = None
    """Factor on the analytic prediction."""
    compiler: float | None = None
    """Factor on the prediction by the compiled program."""
    run: str
    """The run that was measured."""
    date: str

    def __post_init__(self) -> None:
        for value in (self.quick, self.compiler):
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{value} is not a factor")

    def note(self, machine: str, value: float) -> str:
        """Note that the ratio is applied, and how to remove it."""
        return (
            f"times {value:.3g}, as {self.run} measured on {machine} ({self.date}); "
            f"`lmwright plan --measured {self.run} --forget` removes that"
        )


def path() -> Path:
    """The file with the factors."""
    return cache_folder().parent / "machines.json"


def factor_of(machine: str) -> Factor | None:
    """Stored ratio for a machine of this name; None if there is none, or the file is damaged."""
    file = path()
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        return None
    return _read(file, stamp).get(machine)


def keep(machine: str, run: str, **values: float) -> Path:
    """Stores factors (`quick`, `compiler`) of a machine beside those it has; returns the path of
    the file."""
    factors = _all()
    before = asdict(factors[machine]) if machine in factors else {}
    fields = before | {"run": run, "date": str(datetime.date.today())} | values
    _write(factors | {machine: Factor(**fields)})
    return path()


def forget(machine: str) -> bool:
    """Removes the stored factors of a machine. Returns True if there were any."""
    factors = _all()
    if machine not in factors:
        return False
    del factors[machine]
    _write(factors)
    return True


def _all() -> dict[str, Factor]:
    file = path()
    return dict(_read(file, file.stat().st_mtime_ns)) if file.exists() else {}


@lru_cache(8)
def _read(file: Path, stamp: int) -> dict[str, Factor]:
    try:
        return {str(name): Factor(**fields) for name, fields in parse_json(file).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(factors: dict[str, Factor]) -> None:
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, dump_json({name: asdict(factor) for name, factor in factors.items()}))
