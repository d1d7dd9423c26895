"""RunCost: what a whole run takes in time, chips, money and disk, by its predicted step.

    step seconds x steps --> hours --> chip-hours --> USD          (training steps alone)
    state bytes x saves  --> bytes of checkpoints written and kept

Prices are those of `hardware.devices` unless the run or the command line has others.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmwright.config.run import Limits, Run
from lmwright.core.param import Tree, count_params, walk
from lmwright.errors import UserError
from lmwright.hardware.devices import PRICES_DATE, price_of
from lmwright.optim.build import state_slots
from lmwright.planner.analytic.layout import WEIGHT_BYTES
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.phases import phases_of, tokens_until
from lmwright.planner.sessions import (
    course,
    limits_of,
    pace_of,
    session_limit_s,
    steps_that_fit,
)
from lmwright.program.state import RECENT
from lmwright.program.trainee import training_of


@dataclass(frozen=True, kw_only=True)
class Session:
    """Progress of a run in a session of limited time."""

    hours: float
    steps: int
    tokens: int
    sessions: int | None
    """Number of such sessions that the whole run needs, each starting from the last save; None
    where not one step fits into one."""
    margin_minutes: float
    all_hours: float
    """Hours of those sessions together, with start-up and a last save in each."""
    total_hours: float | None = None
    """Hours that `limits.total_hours` allows."""
    start_s: float = 0.0
    """Time until the first step."""
    save_s: float = 0.0
    learned_from: int = 0
    """Number of earlier sessions of the run in which these two were measured; 0 if they are
    assumed."""


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of all training steps; start-up, compilation and evaluation come on top."""

    steps: int
    tokens: int
    hours: float
    unit: str
    """Unit that `chips` counts: chip, GPU or core."""
    chips: int
    chip_hours: float
    usd_per_chip_hour: float | None
    """None where no price is known."""
    spot_usd_per_chip_hour: float | None
    price_source: str
    checkpoint_bytes: int
    checkpoints_written: int
    checkpoints_kept: int
    session: Session | None = None
    total_hours: float | None = None
    """Hours that `limits.total_hours` allows, in one session."""

    @property
    def usd(self) -> float | None:
        price = self.usd_per_chip_hour
        return None if price is None else price * self.chip_hours

    def to_json(self) -> dict:
        """The costs for plan.json: hours, bytes and USD."""
        return asdict(self) | {"usd": self.usd}

    def lines(self) -> list[str]:
        """Text lines for the report."""
        text = f"{self.steps:,} steps: {self.tokens:,} tokens, about {_hours(self.hours)}, "
        text += f"{figure(self.chip_hours)} {self.unit}-hours"
        lines = [text, self._cost(), self._checkpoints()]
        if self.session is not None:
            lines.append(self._session(self.session))
        elif self.total_hours is not None and self.total_hours < self.hours:
            lines.append(
                f"limits.total_hours = {self.total_hours:g}: about "
                f"{int(self.steps * self.total_hours / self.hours):,} of {self.steps:,} steps"
            )
        return lines

    def _cost(self) -> str:
        if self.usd_per_chip_hour is None:
            return "cost: no price is known; give one with --price or plan.prices"
        text = (
            f"cost: {money(self.usd)} at {self.usd_per_chip_hour:g} a {self.unit}-hour "
            f"({self.price_source})"
        )
        if self.spot_usd_per_chip_hour is not None:
            spot = self.spot_usd_per_chip_hour
            text += f"; spot {money(spot * self.chip_hours)} at {spot:g}"
        return text

    def _checkpoints(self) -> str:
        size, written, kept = self.checkpoint_bytes, self.checkpoints_written, self.checkpoints_kept
        return (
            f"checkpoints: {disk(size)} each, {written:,} written ({disk(written * size)}), "
            f"{kept:,} kept ({disk(kept * size)})"
        )

    def _session(self, session: Session) -> str:
        if session.sessions is None:
            return f"{session.hours:g} hours: not one step"
        if session.sessions == 1:
            return f"{session.hours:g} hours: all {session.steps:,} steps"
        text = (
            f"{session.hours:g} hours: {session.steps:,} of {self.steps:,} steps "
            f"({session.steps / self.steps:.2g} of the run), {session.tokens:,} tokens; "
            f"{session.sessions:,} such sessions for the whole run, {figure(session.all_hours)} "
            f"hours with start-up and saving"
        )
        if session.learned_from:
            text += (
                f" ({session.start_s:.0f} s and {session.save_s:.0f} s each, as in "
                f"{session.learned_from} of its sessions)"
            )
        if session.total_hours is not None and session.total_hours < session.all_hours:
            text += f", more than limits.total_hours = {session.total_hours:g}"
        return text


def cost_of(
    run: Run,
    machine: Machine,
    step_s: float,
    tokens_per_step: int,
    *,
    price: float | None = None,
    hours: float | None = None,
) -> RunCost:
    """Cost of the whole run at this speed; `price` in USD per chip-hour goes before
    `plan.prices`, and that before the list. Raises UserError for a price or time below zero."""
    for name, value in (("--price", price), ("--hours", hours)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{name} {value:g}: is not 0 or a positive number; correct it")
    phases, chips = phases_of(run), machine.num_chips
    steps = phases[-1].stop
    run_hours = steps * step_s / 3600
    usd, spot, source = _price(run, machine.kind, price)
    written, kept = _checkpoints(run, steps)
    return RunCost(
        steps=steps,
        tokens=tokens_until(phases, steps, tokens_per_step),
        hours=run_hours,
        unit=machine.unit,
        chips=chips,
        chip_hours=run_hours * chips,
        usd_per_chip_hour=usd,
        spot_usd_per_chip_hour=spot,
        price_source=source,
        checkpoint_bytes=checkpoint_bytes(run),
        checkpoints_written=written,
        checkpoints_kept=kept,
        session=_session(run, machine.kind, step_s, tokens_per_step, limits_of(run, hours)),
        total_hours=run.limits.total_hours,
    )


def _session(
    run: Run, kind: str, step_s: float, tokens_per_step: int, limits: Limits
) -> Session | None:
    if limits.session_hours is None:
        return None
    pace, learned = pace_of(run, kind, step_s, checkpoint_bytes(run))
    limit = session_limit_s(limits)
    phases = phases_of(run)
    done = min(phases[-1].stop, steps_that_fit(pace, limit))
    whole = course(pace, phases[-1].stop, limit)
    return Session(
        hours=limits.session_hours,
        steps=done,
        tokens=tokens_until(phases, done, tokens_per_step),
        sessions=whole.sessions if done else None,
        margin_minutes=limits.margin_minutes,
        all_hours=whole.seconds / 3600,
        total_hours=limits.total_hours,
        start_s=pace.start_s,
        save_s=pace.save_s,
        learned_from=learned,
    )


def _price(run: Run, kind: str, price: float | None) -> tuple[float | None, float | None, str]:
    if price is not None:
        return price, None, "--price"
    if kind in run.plan.prices:
        return run.plan.prices[kind], None, "plan.prices"
    listed = price_of(kind)
    if listed is None:
        return None, None, ""
    return listed.on_demand, listed.spot, f"on demand, list of {PRICES_DATE}"


def checkpoint_bytes(run: Run) -> int:
    """Bytes of a train state, as a checkpoint holds it; of adapters without their base."""
    copies = 1 if run.train.ema_decay is None else 2
    trained = [(trainee.spec, trainee.optim) for trainee in training_of(run).trainees]
    weights = sum(count_params(spec) for spec, _ in trained)
    step = 4  # the run's own count, beside that of each optimizer
    optimizers = sum(_optimizer_bytes(spec, optim) for spec, optim in trained)
    recent = 0 if run.train.skip_spikes == "none" else 2 * 4 * RECENT  # losses and norms
    beside = len(trained) * (2 * 4 + recent)  # counts of skipped steps
    return step + copies * WEIGHT_BYTES * weights + optimizers + beside


def _optimizer_bytes(spec: Tree, optim: Any) -> int:
    slots = (slot for _, slot in walk(state_slots(optim, spec)))
    return sum(math.prod(slot.param.shape) * np.dtype(slot.dtype).itemsize for slot in slots)


def _checkpoints(run: Run, steps: int) -> tuple[int, int]:
    """(written, kept in the end): one every `save_every_steps`, and the last step's."""
    policy = run.checkpoint
    every, keep_every = policy.save_every_steps, policy.keep_every_steps
    written = -(-steps // every)
    if written <= policy.keep_last:
        return written, written
    oldest = min(steps, (written - policy.keep_last + 1) * every)  # of the last ones
    older = 0 if keep_every is None else (oldest - 1) // keep_every
    return written, policy.keep_last + older


def money(usd: float) -> str:
    """USD as text, without cents where it is much."""
    return f"{usd:,.0f} USD" if usd >= 100 else f"{usd:,.2f} USD"


def disk(size: float) -> str:
    """Bytes as text in kB, MB, GB or TB, of a thousand each."""
    for unit, of_it in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * of_it:  # which is the unit in three digits
            return f"{figure(size / of_it)} {unit}"
    return f"{figure(size / 1e3)} kB"


def figure(value: float) -> str:
    """A number with three digits, and all of them before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{figure(hours * 3600)} seconds"
    days = f" ({figure(hours / 24)} days)" if hours >= 48 else ""
    return f"{figure(hours)} hours{days}" if hours >= 1 else f"{hours * 60:.3g} minutes"
