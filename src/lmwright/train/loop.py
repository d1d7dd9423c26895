"""The training loop: reads a batch, runs the step, logs, evaluates and saves.

    batch k --> step --> metrics --> every so often: log, evaluate, save

Resume is one integer for each trainee: the batch of its step k is a pure function of (seed, k),
and the state holds the rest. A trainee that has done its steps, or whose held-out loss stopped
falling, leaves the batch, and the step is compiled again for the others. The run ends with the
last of them. What reads rows, saves, evaluates and shows is handed in, see `train.parts`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.core.processes import of_all
from lmwright.errors import EXIT_INTERRUPTED
from lmwright.evals.source_loss import SourceLoss
from lmwright.guard.heartbeat import beat
from lmwright.kernels.select import attention_taken
from lmwright.program.plan import Plan
from lmwright.program.state import saved
from lmwright.program.step import IN_A_ROW
from lmwright.program.trainee import Trainee
from lmwright.train.early_stop import EarlyStop
from lmwright.train.finite import refuse_state, skipped
from lmwright.train.hooks import Hook
from lmwright.train.parts import (
    Checkpoints,
    Clock,
    Compile,
    Display,
    Evaluator,
    Metrics,
    Profiler,
    Step,
    Values,
)
from lmwright.train.passed import PassedSteps, pass_over
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT, StopRequest

ENDS = {0: "done", EXIT_SESSION_OVER: "session limit", EXIT_TIME_SPENT: "total limit"}


@dataclass(frozen=True)
class Outcome:
    """End of a session: the step reached, and the exit code (0 when the run is done)."""

    step: int
    exit_code: int
    losses: list[SourceLoss]


@dataclass
class Loop:
    """One session of a run, from step `start` to the end or a request to stop."""

    plan: Plan
    state: Tree
    start: int
    counts: dict[str, int]
    """Steps that each trainee has done."""
    early_stops: dict[str, EarlyStop]
    passed: PassedSteps
    facts: dict[str, Any]
    """Facts that go with every saved state."""
    compile: Compile
    evaluator: Evaluator
    checkpoints: Checkpoints
    budget: Clock
    metrics: Metrics
    display: Display
    profiler: Profiler
    stop: StopRequest
    hooks: tuple[Hook, ...] = ()
    losses: list[SourceLoss] = field(default_factory=list)
    """Losses of the last evaluation."""
    unevaluated: list[str] = field(default_factory=list)
    """Trainees of an evaluation that was broken off."""

    at: int = field(init=False)
    """Steps that the run has done."""
    batch: Batch = field(init=False)
    """Batch of the last step."""
    values: Values = field(init=False, default_factory=dict)
    _compiled: Step | None = field(init=False, default=None)
    _save_due: bool = field(init=False, default=False)
    _saved: int = field(init=False)
    _eval_s: float = field(init=False, default=0.0)
    _blocked_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.at = self._saved = self.start

    @property
    def active(self) -> tuple[Trainee, ...]:
        """The trainees that still train."""
        return tuple(trainee for trainee in self.plan.training.trainees if not self._done(trainee))

    def _done(self, trainee: Trainee) -> bool:
        return self.counts[trainee.name] >= trainee.steps or self.early_stops[trainee.name].stopped

    @property
    def steps(self) -> int:
        """The step at which the last trainee ends."""
        return self.at + max((t.steps - self.counts[t.name] for t in self.active), default=0)

    def close(self) -> None:
        """Ends the threads that read rows."""
        if self._compiled is not None:
            self._compiled.close()

    def run(self) -> Outcome:
        """Steps until the end or until asked to stop."""
        if self.start:
            self.metrics.event("resume", step=self.start)
            self.display.note(f"continuing from step {self.start}")
        if self.start < self.steps and (code := of_all(self.budget.over() or 0).max()):
            return self._end(self.start, int(code))  # of a ledger that only one host may have
        due = self.start == 0 and self.plan.run.eval.first == "start"
        if due or self.unevaluated or self.start >= self.steps:
            self._evaluate(self.start)
        if self.unevaluated:
            return self.stopped(self.start)
        if self.start >= self.steps:
            return self._end(self.start, 0)
        first = done = self._passed_over(self.start)
        if not self._may_step(done):
            return self.stopped(done)
        with self.budget.apart("compile"):
            for hook in self.hooks:
                hook.at_start(self, done)
        self._compile()
        self.stop.starting = False
        if self.stop.asked(self._late):
            return self.stopped(done)
        while done < self.steps:
            done = self._passed_over(done)
            if done != first and not self._may_step(done):
                return self.stopped(done)
            self.profiler.before(done + 1, self.state)
            compiled = self._ready_step()
            values = self._step(compiled, done)
            done += 1
            beat("step", step=done)
            self.profiler.after(done, values)
            self._measure(done, values, compiled)
            stopping = self.stop.asked(self._late)
            if done >= self.steps:
                compiled.finish()
            self._save_if_due(done, values, ends=stopping or done >= self.steps)
            if stopping and (self.unevaluated or done < self.steps):
                return self.stopped(done)
        return self._end(done, 0)

    def _measure(self, done: int, values: Values, compiled: Step) -> None:
        """Logs and evaluates a step where that is due, and asks whether there is time for more."""
        if done % self.plan.run.metrics.log_every_steps == 0 or done in (1, self.steps):
            self._log(done, values, compiled)
        # Before the save: a run killed between the two evaluates this step again.
        if self._evaluation_due(done):
            began = time.monotonic()
            self._evaluate(done)
            self._eval_s = time.monotonic() - began
        self.budget.stepped(done, compiled.waited_s)
        if done < self.steps and (code := self.budget.over(self._beside_s(done + 1))):
            self.stop.exit_code = self.stop.exit_code or code

    def _save_if_due(self, done: int, values: Values, *, ends: bool) -> None:
        """Saves after a step with which the session ends, or where a save is due."""
        if _due(done, self.plan.run.checkpoint.save_every_steps) or self.checkpoints.lost():
            self._save_due = True  # if the step is skipped, after the next that is not
        if ends or (self._save_due and not any(skipped(values))):
            self._save(done)

    def _late(self) -> bool:
        """True if the rows of the next step are not there."""
        compiled = self._compiled
        return compiled is not None and self.at < self.steps and compiled.late(self.at)

    def _may_step(self, done: int) -> bool:
        return False not in [hook.before_step(self, done) for hook in self.hooks]

    def stopped(self, step: int) -> Outcome:
        """Saves a session that ends early, with this step."""
        if self._saved != step:
            self._save(step)
        return self._end(step, self.stop.exit_code or EXIT_INTERRUPTED)

    def _passed_over(self, done: int) -> int:
        """The step to go on after: `done`, or the last of the passed steps that follow it."""
        while last := self.passed.last(done + 1):
            pass_over(self, last)
            self.close()
            done, self._compiled = last, None  # other rows follow
        return done

    def _evaluation_due(self, done: int) -> bool:
        ended = any(self.counts[trainee.name] == trainee.steps for trainee in self._trained())
        return ended or done == self.steps or _due(done, self.plan.run.eval.every_steps)

    def _beside_s(self, step: int) -> float:
        """Seconds of the evaluation that follows a step, as long as the one before took."""
        return self._eval_s if self._evaluation_due(step) else 0.0

    def _compile(self) -> Step:
        """Compiles the step for the trainees that still train."""
        beat("compile")
        self.close()
        began = time.monotonic()
        with self.budget.apart("compile"):
            compiled = self.compile(self.state, self.active, self.counts, self.at)
        seconds, by_plan = time.monotonic() - began, compiled.by_plan
        attention = attention_taken(self.plan.compute)
        facts = {"reason": compiled.reason, "attention": attention}
        facts = {name: text for name, text in facts.items() if text}
        self.metrics.event("compile", step=self.at, seconds=seconds, by_plan=by_plan, **facts)
        verb = "loaded the step that plan compiled" if by_plan else "compiled the train step"
        beside = f" ({compiled.reason})" if compiled.reason else ""
        self.display.note(f"{verb} in {seconds:.1f} s{beside}")
        if attention:
            self.display.note(f"attention is computed by {attention}")
        self._compiled = compiled
        return compiled

    def _ready_step(self) -> Step:
        compiled = self._compiled
        if compiled is None or compiled.names != tuple(trainee.name for trainee in self.active):
            return self._compile()
        return compiled

    def _step(self, compiled: Step, k: int) -> Values:
        self.batch, self.state, self.values = compiled(self.state, k)
        for name in compiled.names:
            self.counts[name] += 1
        self.at = k + 1
        self.display.update(self.at)
        for hook in self.hooks:
            hook.after_step(self, self.at)
        return self.values

    def _log(self, step: int, values: Values, compiled: Step) -> None:
        measured = {name: float(v) for name, v in values.items() if not name.startswith(IN_A_ROW)}
        measured |= compiled.measured()
        rows = sum(t.rows * self.counts[t.name] for t in self.plan.training.trainees)
        measured["tokens_seen"] = float(rows * self.plan.seq_len)
        self.metrics.log(step, **measured)
        self.display.update(step, **measured)
        for hook in self.hooks:
            hook.after_log(self, step, measured)

    def _trained(self) -> list[Trainee]:
        """The trainees of the last step; all of them before there is one."""
        names = self._compiled.names if self._compiled else self.counts
        return [trainee for trainee in self.plan.training.trainees if trainee.name in names]

    def _evaluate(self, step: int) -> None:
        """Held-out losses and samples of each trainee of the last step, or of those of an
        evaluation that was broken off, on its own data."""
        beat("eval")
        self.losses, due = [], self.unevaluated or [trainee.name for trainee in self._trained()]
        for trainee in [t for t in self.plan.training.trainees if t.name in due]:
            self.unevaluated = due[due.index(trainee.name) :]
            with self.paused("evaluate"):
                losses = self.evaluator.evaluate(step, self.state, trainee.name, self._stops)
            if losses is None:
                return
            self.losses += losses
            if tokens := sum(loss.tokens for loss in losses):
                mean = sum(loss.loss * loss.tokens for loss in losses) / tokens
                self._see_loss(step, trainee, mean)
        self.unevaluated = []
        for hook in self.hooks:
            hook.after_evaluate(self, step)

    def _stops(self) -> bool:
        """True if an evaluation is to be broken off; one that begins the session has its time."""
        if self.at > self.start and (code := self.budget.over()):
            self.stop.exit_code = self.stop.exit_code or code
        return self.stop.asked()

    def _see_loss(self, step: int, trainee: Trainee, loss: float) -> None:
        early, name = self.early_stops[trainee.name], trainee.name
        if early.stopped:  # in a session before, whose finished run is evaluated once more
            return
        early.see(loss, trainee.patience)
        if early.stopped and self.counts[name] < trainee.steps:
            self.metrics.event("adapter stopped", step=step, adapter=name, best_loss=early.best)
            self.display.note(f"{name}: stopped: its held-out loss no longer falls")

    def _save(self, step: int) -> None:
        """Starts saving the state. Raises UserError where it is not finite."""
        for hook in self.hooks:
            hook.before_save(self, step)
        beat("save", saved=self.checkpoints.newest() or 0)
        began, state = time.monotonic(), saved(self.state)
        with self.paused("save"):
            refuse_state(self.plan, self.checkpoints, step, state)
            self.checkpoints.save(step, state, self.meta())
        self._save_due, self._saved = False, step
        self._blocked_s = time.monotonic() - began
        self.metrics.event("checkpoint", step=step, blocked_s=self._blocked_s)
        self.display.saved(step)
        for hook in self.hooks:
            hook.after_save(self, step)

    def meta(self) -> dict[str, Any]:
        """Facts that go with a state."""
        losses = {name: vars(early) for name, early in self.early_stops.items()}
        own = {"trainees": losses, "passed": self.passed.ranges, "unevaluated": self.unevaluated}
        return self.facts | own

    @contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Context in which time belongs to no step, but to a part such as "save"."""
        compiled = self._compiled
        with self.budget.apart(part), compiled.paused() if compiled else nullcontext():
            yield

    def _end(self, step: int, exit_code: int) -> Outcome:
        began = time.monotonic()
        self.checkpoints.wait()
        beat("end", saved=self.checkpoints.newest() or 0)
        if self._blocked_s:
            self.budget.saved(self._blocked_s + time.monotonic() - began)
        for hook in self.hooks:
            hook.at_end(self, step, exit_code)
        self.budget.close(ENDS.get(exit_code, "stopped"))
        return Outcome(step=step, exit_code=exit_code, losses=self.losses)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
