"""The training loop: reads a batch, runs the step, logs, evaluates and saves.

    feed.batch(k) --> step --> metrics --> every so often: log, evaluate, save

Resume is one integer for each trainee: the batch of its step k is a pure function of (seed, k),
and the state holds the rest. A trainee that has done its steps, or whose held-out loss stopped
falling, leaves the batch, and the step is compiled again for the others. The run ends with the
last of them.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax

from lmwright.checkpoint.memory import MemoryTier
from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.vocabulary import note_unused
from lmwright.errors import EXIT_INTERRUPTED
from lmwright.evals.held_out import HeldOut
from lmwright.evals.loss import SourceLoss
from lmwright.formats.weights import load_frozen
from lmwright.guard.heartbeat import beat
from lmwright.program.length import completed
from lmwright.program.plan import Plan, resolve
from lmwright.program.state import counts_of, saved
from lmwright.program.step import IN_A_ROW, Lanes
from lmwright.program.trainee import Frozen, Trainee
from lmwright.train.budget import Budget
from lmwright.train.compiled import CompiledStep
from lmwright.train.corruption import Checks
from lmwright.train.display import Display, headline
from lmwright.train.evaluated import eval_weights, write_down
from lmwright.train.finite import refuse_state
from lmwright.train.gradient_error import note_gradient_error
from lmwright.train.hooks import HOOKS, Hook, Values
from lmwright.train.host_memory import refuse_small_host
from lmwright.train.memory import keeping
from lmwright.train.metrics import MetricsWriter
from lmwright.train.profile import Profiler
from lmwright.train.publishing import publishing
from lmwright.train.rollback import PassedSteps, pass_over
from lmwright.train.rundir import KeepClaim, claim, keep_tokenizer
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT, StopRequest
from lmwright.train.skips import Skips, skipped
from lmwright.train.start import restore_or_init
from lmwright.train.stores import open_stores
from lmwright.train.throughput import StepTimer, memory_bytes
from lmwright.train.watch import Watch

ENDS = {0: "done", EXIT_SESSION_OVER: "session limit", EXIT_TIME_SPENT: "total limit"}


@dataclass(frozen=True)
class Outcome:
    """How a session ended: the step reached, and the exit code (0 when the run is done)."""

    step: int
    exit_code: int
    losses: list[SourceLoss]


def train(
    run: Run,
    devices: list[jax.Device] | None = None,
    *,
    began: float | None = None,
    stop: StopRequest | None = None,
    hooks: Sequence[Hook] = (),
) -> Outcome:
    """Trains until the run is done, is asked to stop or runs out of time, starting from the newest
    intact checkpoint. `began` is the start of the session's machine time (`time.monotonic`), now if
    unset. `stop` is the signal handler if the caller has installed one. Raises UserError for
    anything that a user can fix."""
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest()) if stop is None else stop
        run = completed(run)
        plan = resolve(run, devices)
        refuse_small_host(plan)
        stop.starting = stop.starting and jax.process_count() == 1
        stores = open_stores(plan)  # before the claim: a refusal leaves no folder behind
        trainees = plan.training.trainees
        Lanes.of(plan, trainees)  # refuses rows that do not divide
        frozen = load_frozen(plan)
        folder = stack.enter_context(claim(run, plan))
        path = folder.path
        keep_tokenizer(path, stores[trainees[0].name])
        checkpoints = Checkpoints(path, run.checkpoint, before_commit=folder.push)
        stack.enter_context(checkpoints)
        tier = MemoryTier(path) if run.checkpoint.memory_every_steps else None
        passed = PassedSteps(path)
        state, meta = restore_or_init(plan, checkpoints, stores, frozen, tier, passed)
        start, counts = int(meta.get("step", 0)), counts_of(state)
        beat("restore", step=start, saved=start)
        left = max(0, *(trainee.steps - counts[trainee.name] for trainee in trainees))
        stack.enter_context(jax.set_mesh(plan.mesh))
        watched = meta.get("trainees", {})
        session = Session(
            plan=plan,
            state=state,
            start=start,
            frozen=frozen,
            stores=stores,
            counts=counts,
            watches={trainee.name: Watch(**watched.get(trainee.name, {})) for trainee in trainees},
            checkpoints=checkpoints,
            passed=passed,
            stop=stop,
            budget=Budget.of(run, path, start, saved(state), began),
            metrics=stack.enter_context(MetricsWriter(path, run, start or None)),
            display=stack.enter_context(Display(run, start + left, start)),
            profiler=stack.enter_context(Profiler(path, run.metrics.profile_steps)),
            hooks=(
                *(KeepClaim(folder), Skips(plan, checkpoints)),
                *((Checks(plan),) if run.train.check_every_steps else ()),
                *(*keeping(run, tier), *publishing(run, path, stack), *HOOKS, *hooks),
            ),
        )
        stack.callback(session.close)
        return session.run()


@dataclass
class Session:
    """One process's stretch of a run, from `start` to the end or a request to stop."""

    plan: Plan
    state: Tree
    start: int
    frozen: Frozen
    stores: dict[str, TokenStore]
    """Prepared data by trainee."""
    counts: dict[str, int]
    """Steps that each trainee has done."""
    watches: dict[str, Watch]
    checkpoints: Checkpoints
    passed: PassedSteps
    stop: StopRequest
    budget: Budget
    metrics: MetricsWriter
    display: Display
    profiler: Profiler
    hooks: tuple[Hook, ...] = ()
    losses: list[SourceLoss] = field(default_factory=list)
    """Of the last evaluation."""

    at: int = field(init=False)
    """Steps that the run has done."""
    batch: Batch = field(init=False)
    """Of the last step."""
    values: Values = field(init=False, default_factory=dict)
    _compiled: CompiledStep | None = field(init=False, default=None)
    _held_out: dict[str, HeldOut] = field(init=False, default_factory=dict)
    _save_due: bool = field(init=False, default=False)
    _eval_s: float = field(init=False, default=0.0)
    _blocked_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.at = self.start

    @property
    def active(self) -> tuple[Trainee, ...]:
        """The trainees that still train."""
        return tuple(trainee for trainee in self.plan.training.trainees if not self._done(trainee))

    def _done(self, trainee: Trainee) -> bool:
        return self.counts[trainee.name] >= trainee.steps or self.watches[trainee.name].stopped

    @property
    def steps(self) -> int:
        """The step at which the last trainee ends."""
        return self.at + max((t.steps - self.counts[t.name] for t in self.active), default=0)

    def close(self) -> None:
        """Ends the threads that read rows."""
        if self._compiled is not None:
            self._compiled.feed.close()

    def run(self) -> Outcome:
        """Steps until the end or until asked to stop."""
        run = self.plan.run
        self._held_out = {name: HeldOut(self.plan, s) for name, s in self.stores.items()}
        self.display.note(headline(self.plan))
        if self.start:
            self.metrics.event("resume", step=self.start)
            self.display.note(f"continuing from step {self.start}")
        self._note_unused()
        if self.start < self.steps and (code := self.budget.over()):
            return self._end(self.start, code)
        if self.start == 0 and run.eval.first == "start":
            self._evaluate(0)
        if self.start >= self.steps:
            self._evaluate(self.steps)
            return self._end(self.start, 0)
        done = self._passed_over(self.start)
        with self.budget.apart("compile"):
            note_gradient_error(self.plan, self.active, self.state, self.stores, self, done)
        self._compile()
        self.stop.starting = False
        while done < self.steps:
            done = self._passed_over(done)
            self.profiler.before(done + 1, self.state)
            compiled = self._ready_step()
            values = self._step(compiled, done)
            done += 1
            beat("step", step=done)
            self.profiler.after(done, values)
            if done % run.metrics.log_every_steps == 0 or done in (1, self.steps):
                self._log(done, values, compiled.timer)
            # Before the save: a run killed between the two evaluates this step again.
            if self._evaluation_due(done):
                began = time.monotonic()
                self._evaluate(done)
                self._eval_s = time.monotonic() - began
            self.budget.stepped(done, compiled.timer.waited_s)
            if done < self.steps and (code := self.budget.over(self._beside_s(done + 1))):
                self.stop.exit_code = self.stop.exit_code or code
            stopping = self.stop.asked(done)
            if done >= self.steps:
                compiled.feed.finish()
            if _due(done, run.checkpoint.save_every_steps) or self.checkpoints.lost():
                self._save_due = True  # if the step is skipped, after the next that is not
            if done >= self.steps or stopping or (self._save_due and not any(skipped(values))):
                self._save(done)
            if stopping and done < self.steps:
                return self._end(done, self.stop.exit_code or EXIT_INTERRUPTED)
        return self._end(done, 0)

    def _passed_over(self, done: int) -> int:
        """The step to go on after, that or the last of those that are without effect."""
        while last := self.passed.last(done + 1):
            pass_over(self, last)
            self.close()
            done, self._compiled = last, None  # other rows follow
        return done

    def _note_unused(self) -> None:
        run, store = self.plan.run, self.stores[self.plan.training.trainees[0].name]
        if run.train.init_from is None and not self.plan.training.freezes:
            unused = note_unused(run.model, run.data.dir, store.vocab_size)
            if unused:
                self.display.note(unused)

    def _evaluation_due(self, done: int) -> bool:
        ended = any(self.counts[trainee.name] == trainee.steps for trainee in self._trained())
        return ended or done == self.steps or _due(done, self.plan.run.eval.every_steps)

    def _beside_s(self, step: int) -> float:
        """Seconds of the evaluation that follows a step, as long as the one before took."""
        return self._eval_s if self._evaluation_due(step) else 0.0

    def _compile(self) -> CompiledStep:
        """Compiles the step for the trainees that still train."""
        beat("compile")
        self.close()
        began = time.monotonic()
        with self.budget.apart("compile"):
            compiled = CompiledStep.of(
                self.plan, self.state, self.active, self.stores, self.counts, self.at
            )
        seconds, ready = time.monotonic() - began, compiled.ready
        why = {"reason": ready.reason} if ready.reason else {}
        event = {"seconds": seconds, "by_plan": ready.by_plan} | why
        self.metrics.event("compile", step=self.start, **event)
        verb = "loaded the step that plan compiled" if ready.by_plan else "compiled the train step"
        beside = f" ({ready.reason})" if ready.reason else ""
        self.display.note(f"{verb} in {seconds:.1f} s{beside}")
        self._compiled = compiled
        return compiled

    def _ready_step(self) -> CompiledStep:
        compiled = self._compiled
        if compiled is None or compiled.names != tuple(trainee.name for trainee in self.active):
            return self._compile()
        return compiled

    def _step(self, compiled: CompiledStep, k: int) -> Values:
        self.batch, self.state, self.values = compiled(self.state, k)
        for name in compiled.names:
            self.counts[name] += 1
        self.at = k + 1
        self.display.update(self.at)
        for hook in self.hooks:
            hook.after_step(self, self.at)
        return self.values

    def _log(self, step: int, values: Values, timer: StepTimer) -> None:
        measured = {name: float(v) for name, v in values.items() if not name.startswith(IN_A_ROW)}
        measured |= timer.window()
        measured["peak_memory_bytes"] = float(memory_bytes(self.plan.devices))
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
        """Held-out losses and samples of each trainee of the last step, on its own data."""
        beat("eval")
        self.losses = []
        for trainee in self._trained():
            prefix = f"{trainee.name}/" if len(self.stores) > 1 else ""
            held_out = self._held_out[trainee.name]
            weights = eval_weights(self.plan, self.state, trainee.name)
            with self._paused("evaluate"):
                losses, samples = held_out.losses(weights), held_out.samples(weights)
            self.losses += losses
            write_down(self.metrics, self.display, step, prefix, losses, samples)
            tokens = sum(loss.tokens for loss in losses)
            if tokens:
                mean = sum(loss.loss * loss.tokens for loss in losses) / tokens
                self._watch(step, trainee, mean)
        for hook in self.hooks:
            hook.after_evaluate(self, step)

    def _watch(self, step: int, trainee: Trainee, loss: float) -> None:
        watch, name = self.watches[trainee.name], trainee.name
        watch.see(loss, trainee.patience)
        if watch.stopped and self.counts[name] < trainee.steps:
            self.metrics.event("adapter stopped", step=step, adapter=name, best_loss=watch.best)
            self.display.note(f"{name}: stopped: its held-out loss no longer falls")

    def _save(self, step: int) -> None:
        """Starts saving the state. Raises UserError where it is not finite."""
        for hook in self.hooks:
            hook.before_save(self, step)
        beat("save", saved=self.checkpoints.newest() or 0)
        began, state = time.monotonic(), saved(self.state)
        with self._paused("save"):
            refuse_state(self.plan, self.checkpoints, step, state)
            self.checkpoints.save(step, state, self.meta())
        self._save_due = False
        self._blocked_s = time.monotonic() - began
        self.metrics.event("checkpoint", step=step, blocked_s=self._blocked_s)
        self.display.saved(step)
        for hook in self.hooks:
            hook.after_save(self, step)

    def meta(self) -> dict[str, Any]:
        """Facts that go with a state."""
        return {
            "stores": {name: store.fingerprint for name, store in self.stores.items()},
            "frozen": {"path": self.frozen.path, "hash": self.frozen.hash},
            "trainees": {name: vars(watch) for name, watch in self.watches.items()},
            "passed": self.passed.ranges,
            "run": dump_toml(self.plan.run),
        }

    @contextmanager
    def _paused(self, part: str) -> Iterator[None]:
        compiled = self._compiled
        with self.budget.apart(part), compiled.timer.paused() if compiled else nullcontext():
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
