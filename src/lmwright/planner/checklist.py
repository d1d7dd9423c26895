"""Checklist: what has to hold before a run is worth its machine time, each line with its evidence.

`plan` fills in what can be known without the machine; `train --rehearse` the rest, on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmwright.data.missing import has_adapter_data
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.formats.open import HF, open_origin
from lmwright.formats.weights import added_weights, fresh_weights, taken_spec
from lmwright.hardware.chips import GIB
from lmwright.planner.units import short_duration
from lmwright.program.plan import Plan
from lmwright.program.stores import open_stores

FITS, SPEED, FALLS, RESUMES = "fits", "speed", "loss falls", "resumes"
ADAPTERS, EXPORT, WRITES = "adapters in PEFT", "export", "writes text"
WORDS = {True: "yes", False: "no", None: "not known"}


@dataclass(frozen=True)
class Check:
    """One line: what holds (True), does not (False) or cannot be known (None), and why."""

    name: str
    holds: bool | None
    evidence: str

    def line(self) -> str:
        """The check as a line of the list."""
        return f"  {WORDS[self.holds]:<10} {self.name:<18} {self.evidence}".rstrip()


def checklist(checks: Sequence[Check]) -> list[str]:
    """All lines of the checklist, below a title."""
    return ["checklist:", *(check.line() for check in checks)]


def fits_check(peak_bytes: float, limit_bytes: float | None, fits: bool) -> Check:
    """The check of a device's memory, with what is left of it."""
    if limit_bytes is None:
        return Check(FITS, None, f"{peak_bytes / GIB:.2f} GiB of the host's memory")
    spare = limit_bytes - peak_bytes
    beside = f"{spare / GIB:.2f} GiB to spare" if spare >= 0 else f"{-spare / GIB:.2f} GiB too much"
    used = f"{peak_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB"
    return Check(FITS, fits, f"{used}, {beside}")


def known_now(
    plan: Plan, peak_bytes: float, limit_bytes: float | None, step_s: float | None, fits: bool
) -> list[str]:
    """The checklist of a run that is planned."""
    run = plan.run
    speed = "" if step_s is None else f"{short_duration(step_s)} a step predicted"
    later = (FALLS, RESUMES, ADAPTERS if run.lora else EXPORT, WRITES)
    checks = [
        _data_check(plan),
        *_weights_check(plan),
        fits_check(peak_bytes, limit_bytes, fits),
        Check(SPEED, None, speed),
        *(Check(name, None, "") for name in later),
    ]
    rest = "a rehearsal on that machine shows what is unknown here: lmwright train RUN --rehearse"
    return [*checklist(checks), rest]


def _data_check(plan: Plan) -> Check:
    run = plan.run
    if has_adapter_data(run):
        return Check("data loads", None, "each adapter has its own")
    if "://" in run.data.dir:
        return Check("data loads", None, f"{run.data.dir} is not read here")
    try:
        store = TokenStore.open(run.data.dir)
    except UserError:
        return Check("data loads", None, f"nothing is prepared in {run.data.dir}; lmwright prepare")
    try:
        open_stores(plan)
    except UserError as error:
        return Check("data loads", False, str(error))
    return Check("data loads", True, f"{store.epoch_rows:,} rows of {store.seq_len:,} tokens")


def _weights_check(plan: Plan) -> list[Check]:
    """The check of the weights of `train.init_from` against the run's model, by their header."""
    run, path = plan.run, plan.run.train.init_from
    if path is None:
        return []
    if "://" in path or not Path(path).expanduser().exists():
        return [Check("weights load", None, f"{path} is not read here")]
    try:
        place = open_origin(path, run.model, header=True)
        if not run.objective.parts:
            taken_spec(plan, place, fresh_weights(plan, place), added_weights(plan, place))
    except UserError as error:
        return [Check("weights load", False, str(error))]
    if place.kind == HF and not any(place.path.glob("*.safetensors")):
        return [Check("weights load", None, f"{path} holds no weights yet; its config.json fits")]
    return [Check("weights load", True, f"{path}: every weight has its shape")]
