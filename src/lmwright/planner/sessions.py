"""Sessions: how far a run gets in machine time that ends, as at Kaggle or on a grant.

    |start|step|step|...|step|save|margin|      one session; the next one goes on from the save
                                         ^ limit

One rule serves both the plan and the training loop: a step is begun only if it and a last save
end before the limit, less a margin.

    RUN/sessions.json, RUN/env.json --> Pace        (assumed times where there are none)

Only sessions on the same kind of chip count. Of a run in a bucket, what was fetched last is used:
`plan` asks no service.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmwright.config.run import Limits, Run
from lmwright.data.json_text import parse_json
from lmwright.errors import UserError
from lmwright.hardware.devices import chip_of, gpu_name
from lmwright.report.goodput import read_sessions
from lmwright.report.ledger import DEVICES, SPENT, usual_save_s
from lmwright.storage.mirror import mirror_folder

MOST_STEPS = 10**15  # of a session, however long
ASSUMED_START_S = 180.0
"""Start-up time that a plan assumes: imports, compilation, restoring."""
ASSUMED_SAVE_BYTES_PER_S = 5e8
"""Speed that a plan assumes until a run has measured how fast its checkpoints are written."""


@dataclass(frozen=True)
class Pace:
    """Speed of a run, in seconds."""

    step_s: float
    save_s: float
    """Time to save a checkpoint that is waited for."""
    start_s: float = 0.0
    """Time of a session before its first step."""


@dataclass(frozen=True)
class Course:
    """The sessions of a whole run, or as many as the total allows."""

    sessions: int
    steps: int
    seconds: float


def session_limit_s(limits: Limits) -> float:
    """Seconds of one session that may be used; infinite without a limit."""
    if limits.session_hours is None:
        return math.inf
    return limits.session_hours * 3600 - limits.margin_minutes * 60


def fits(elapsed_s: float, next_s: float, save_s: float, limit_s: float) -> bool:
    """True if there is time for `next_s` more seconds of training and a save."""
    return elapsed_s + next_s + save_s <= limit_s


def steps_that_fit(pace: Pace, limit_s: float) -> int:
    """Steps of a session that may use `limit_s` seconds: the most for which `fits` holds."""
    room = limit_s - pace.start_s - pace.save_s
    if room < pace.step_s:
        return 0
    # seconds are not added up one by one, so a hair is forgiven
    return math.floor(min(room / pace.step_s * (1 + 1e-12), MOST_STEPS))


def course(pace: Pace, steps: int, session_s: float, total_s: float = math.inf) -> Course:
    """Session after session until `steps` are done, the total is spent, or no step fits."""
    done = sessions = 0
    spent = 0.0
    while done < steps:
        limit = min(session_s, total_s - spent)
        here = steps - done if limit == math.inf else min(steps_that_fit(pace, limit), steps - done)
        if not here:
            break
        sessions, done = sessions + 1, done + here
        spent += pace.start_s + here * pace.step_s + pace.save_s
    return Course(sessions, done, spent)


def assumed_pace(step_s: float, checkpoint_bytes: int) -> Pace:
    """The pace of a run that is only planned."""
    return Pace(step_s, assumed_save_s(checkpoint_bytes), ASSUMED_START_S)


def assumed_save_s(checkpoint_bytes: int) -> float:
    """Seconds to write a checkpoint, before any was written."""
    return checkpoint_bytes / ASSUMED_SAVE_BYTES_PER_S


def limits_of(run: Run, hours: float | None) -> Limits:
    """The run's limits, with sessions of `hours` if given."""
    return run.limits if hours is None else replace(run.limits, session_hours=hours)


def pace_of(run: Run, kind: str, step_s: float, checkpoint_bytes: int) -> tuple[Pace, int]:
    """The pace of a run's next session on this kind of machine, and the number of sessions that it
    was learned from."""
    assumed = assumed_pace(step_s, checkpoint_bytes)
    try:
        folder = mirror_folder(run.dir)
        env = parse_json(folder / "env.json")
        sessions = read_sessions(folder)
    except (OSError, ValueError, UserError):
        return assumed, 0
    env = env if isinstance(env, dict) else {}
    here = [entry for entry in sessions if _kind_of(entry, env) == kind]
    begun = (entry for entry in here if entry["last_step"] > entry["first_step"])
    spent = [entry[SPENT] for entry in begun if isinstance(entry.get(SPENT), dict)]
    starts = [float(parts.get("start", 0)) + float(parts.get("compile", 0)) for parts in spent]
    if not starts:
        return assumed, 0
    save_s = usual_save_s(here) or assumed.save_s
    return Pace(step_s, save_s, statistics.median(starts)), len(starts)


def _kind_of(session: Mapping[str, Any], env: dict) -> str:
    """Kind of the machine of a session; that of env.json, the newest, where it says none."""
    devices = session.get(DEVICES)
    if not isinstance(devices, dict) or "kind" not in devices:
        return _kind(env)
    kind = str(devices["kind"])
    return kind if kind == "cpu" else _kind({"device_kind": kind})


def _kind(env: dict) -> str:
    """Kind of the machine that an env.json describes; empty if it is unknown."""
    if env.get("device_platform") == "cpu":
        return "cpu"
    kind = str(env.get("device_kind", ""))
    chip = chip_of(kind)
    return chip.name if chip is not None else gpu_name(kind) or ""
