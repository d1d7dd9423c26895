"""Learned: start-up and save times of a run's own sessions, for the plan of those that follow.

    RUN/sessions.json, RUN/env.json --> Pace        (assumed times where there are none)

Only sessions on the same kind of chip count. Of a run in a bucket, what was fetched last is used:
`plan` asks no service.
"""

import statistics

from lmwright.config.run import Run
from lmwright.data.json_text import parse_json
from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import GPUS
from lmwright.planner.sessions import Pace, assumed_pace
from lmwright.report.goodput import SPENT, parse_sessions
from lmwright.storage.mirror import mirror_folder


def pace_of(run: Run, kind: str, step_s: float, checkpoint_bytes: int) -> tuple[Pace, int]:
    """The pace of a run's next session on this kind of machine, and the number of sessions that it
    was learned from."""
    assumed = assumed_pace(step_s, checkpoint_bytes)
    try:
        folder = mirror_folder(run.dir)
        env = parse_json(folder / "env.json")
        sessions = parse_sessions((folder / "sessions.json").read_bytes())
    except (OSError, ValueError, UserError):
        return assumed, 0
    spent = [entry[SPENT] for entry in sessions if isinstance(entry.get(SPENT), dict)]
    starts = [float(parts.get("start", 0)) + float(parts.get("compile", 0)) for parts in spent]
    if not starts or not isinstance(env, dict) or _kind(env) != kind:
        return assumed, 0
    saves = [float(entry["save_s"]) for entry in sessions if entry.get("save_s")]
    save_s = statistics.median(saves) if saves else assumed.save_s
    return Pace(step_s, save_s, statistics.median(starts)), len(starts)


def _kind(env: dict) -> str:
    """Kind of the machine that an env.json describes; empty if it is unknown."""
    if env.get("device_platform") == "cpu":
        return "cpu"
    kind = str(env.get("device_kind", ""))
    gpus = [name for name, gpu in GPUS.items() if gpu.device_kind == kind]
    chips = [name for name, chip in CHIPS.items() if kind in chip.device_kinds]
    return next(iter(gpus + chips), "")
