"""The training loop: reads a batch, runs the step, and sees to everything around it.

    loader.batch(k) --> step --> metrics --> every so often: log, evaluate, save

Resume is one integer: the batch of step k is a pure function of (seed, k), and the state
holds the rest.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.core.batch import Batch
from lmwright.core.param import Tree
from lmwright.data.rows.loader import Loader
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.vocabulary import note_unused
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.evals.held_out import HeldOut
from lmwright.evals.loss import SourceLoss
from lmwright.objectives import KINDS
from lmwright.objectives.base import learns_from
from lmwright.planner.compiler.compile import refuse_option
from lmwright.program.executable import load_or_compile, takes
from lmwright.program.length import with_steps
from lmwright.program.plan import Plan, resolve, step_options
from lmwright.program.state import abstract_batch, abstract_state, eval_weights
from lmwright.program.step import Step, make_step
from lmwright.train.budget import Budget
from lmwright.train.display import Display
from lmwright.train.finite import refuse_state, refuse_values
from lmwright.train.hosts import HostRows
from lmwright.train.metrics import MetricsWriter
from lmwright.train.profile import Profiler
from lmwright.train.rundir import claim, keep_tokenizer
from lmwright.train.signals import (
    EXIT_SESSION_OVER,
    EXIT_TIME_SPENT,
    StopRequest,
)
from lmwright.train.start import first_state
from lmwright.train.throughput import StepTimer, memory_bytes, peak_flops

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
) -> Outcome:
    """Trains until the run is done, told to stop or out of time; goes on from the newest intact
    checkpoint. `began` is when the session's machine time began (`time.monotonic`), now if unset.
    `stop` handles signals where the caller has begun to. Raises UserError for anything a user can
    cure."""
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest()) if stop is None else stop
        run = with_steps(run)
        plan = resolve(run, devices)
        stop.starting = stop.starting and jax.process_count() == 1
        if run.lora is not None:
            from lmwright.train.lora_loop import train_adapters

            return train_adapters(plan, began, stop)
        store = open_store(run, plan)  # before the claim: a refusal leaves no folder behind
        folder = stack.enter_context(claim(run, plan))
        keep_tokenizer(folder, store)
        checkpoints = stack.enter_context(Checkpoints(folder, run.checkpoint))
        state, start = restore_or_init(plan, checkpoints, store)
        stack.enter_context(jax.set_mesh(plan.mesh))
        session = Session(
            plan=plan,
            state=state,
            start=start,
            store=store,
            checkpoints=checkpoints,
            stop=stop,
            budget=Budget.of(run, folder, start, state, began),
            metrics=stack.enter_context(MetricsWriter(folder, run, start or None)),
            display=stack.enter_context(Display(run, run.train.steps, start)),
            profiler=stack.enter_context(Profiler(folder, run.metrics.profile_steps)),
            loader=stack.enter_context(make_loader(plan, store, start)),
        )
        return session.run()


def open_store(
    run: Run, plan: Plan, folder: str | None = None, rows: int | None = None
) -> TokenStore:
    """The run's prepared data, or that of `folder`, checked against the run and the rows that
    each step takes of it."""
    folder = folder or run.data.dir
    store = TokenStore.open(folder)
    if store.seq_len != plan.seq_len:
        raise UserError(
            f"{folder}: rows hold {store.seq_len} tokens, the run wants {plan.seq_len}; "
            f"prepare again or set data.pack.seq_len = {store.seq_len}"
        )
    if store.vocab_size > run.model.vocab_size:
        raise UserError(
            f"model.vocab_size: {run.model.vocab_size} is smaller than the {store.vocab_size} ids "
            f"of the tokenizer in {folder}; raise it"
        )
    _check_kind(run, store)
    store.check(global_batch_size=rows or run.train.global_batch_size)
    return store


def _check_kind(run: Run, store: TokenStore) -> None:
    wanted = learns_from(run.objective)
    if wanted != store.holds:
        known = " or ".join(name for name, o in KINDS.items() if learns_from(o) == store.holds)
        rows = {"pairs of answers": "preference", "rated answers": "rated"}
        other = f', or sources of rows = "{rows[wanted]}"' if wanted in rows else ""
        raise UserError(
            f"{run.data.dir}: holds {store.holds}, which objective.kind = {run.objective.kind!r} "
            f"cannot train on; choose {known}{other}"
        )


def make_loader(plan: Plan, store: TokenStore, start: int) -> Loader:
    """This host's share of every batch."""
    return Loader(
        store,
        global_batch_size=plan.run.train.global_batch_size,
        stretches=HostRows.of(plan).of_batch,
        start_step=start,
        host=(jax.process_index(), jax.process_count()),
    )


def restore_or_init(plan: Plan, checkpoints: Checkpoints, store: TokenStore) -> tuple[Tree, int]:
    """The newest intact state and its step, or a fresh one and 0."""
    restored = checkpoints.restore(abstract_state(plan))
    if restored is None:
        return first_state(plan, store), 0
    state, meta = restored
    if meta.get("store") != store.fingerprint:
        raise UserError(
            f"{plan.run.data.dir}: the prepared data is not what {plan.run.dir} was trained on; "
            f"prepare it as before, or choose another dir="
        )
    return state, int(meta["step"])


def to_device(plan: Plan, host: HostRows, rows: dict[str, np.ndarray]) -> Batch:
    """Host rows [b, T] as a global batch [A, B, T]; each host gives its own rows."""
    return Batch(**{name: host.place(plan, rows[name]) for name in Batch.__dataclass_fields__})


@dataclass
class Session:
    """One process's stretch of a run, from `start` to the end or a request to stop."""

    plan: Plan
    state: Tree
    start: int
    store: TokenStore
    checkpoints: Checkpoints
    stop: StopRequest
    budget: Budget
    metrics: MetricsWriter
    display: Display
    profiler: Profiler
    loader: Loader

    @property
    def steps(self) -> int:
        """The step at which the run ends."""
        return self.plan.run.train.steps

    def prepare(self) -> None:
        """What is made once, before the first step."""
        self.held_out = HeldOut(self.plan, self.store)

    def run(self) -> Outcome:
        """Steps until the end or until asked to stop."""
        run = self.plan.run
        self.prepare()
        self.display.note(opening_line(self.plan))
        self.losses: list[SourceLoss] = []
        self._eval_s = self._blocked_s = 0.0
        if self.start:
            self.metrics.event("resume", step=self.start)
            self.display.note(f"continuing from step {self.start}")
        unused = note_unused(run.model, run.data.dir, self.store.vocab_size)
        if unused and run.lora is None and run.train.init_from is None:
            self.display.note(unused)
        if self.start < self.steps and (code := self.budget.over()):
            return self._end(self.start, code)
        if self.start == 0 and run.eval.first == "start":
            self._evaluate(0)
        if self.start >= self.steps:
            self._evaluate(self.steps)
            return self._end(self.start, 0)
        with self.budget.apart():
            self._compile()
        self.stop.starting = False
        done = self.start
        while done < self.steps:
            self.profiler.before(done + 1, self.state)
            values = self._step(done)
            done += 1
            self.profiler.after(done, values)
            if done % run.metrics.log_every_steps == 0 or done in (1, self.steps):
                self._log(done, values)
            # Before the save: a run killed between the two evaluates this step again.
            if self._evaluation_due(done):
                began = time.monotonic()
                self._evaluate(done)
                self._eval_s = time.monotonic() - began
            self.budget.stepped(done)
            if done < self.steps and (code := self.budget.over(self._beside_s(done + 1))):
                self.stop.exit_code = self.stop.exit_code or code
            stopping = self.stop.asked(done)
            if done >= self.steps or stopping or _due(done, run.checkpoint.save_every_steps):
                self._save(done)
            if stopping and done < self.steps:
                return self._end(done, self.stop.exit_code or EXIT_INTERRUPTED)
        return self._end(done, 0)

    def _evaluation_due(self, done: int) -> bool:
        return done == self.steps or _due(done, self.plan.run.eval.every_steps)

    def _beside_s(self, step: int) -> float:
        """Seconds of the evaluation that follows a step, as long as the one before took."""
        return self._eval_s if self._evaluation_due(step) else 0.0

    def _program(self) -> tuple[Step, Batch, HostRows]:
        """The step, the shapes of its batch, and this host's rows of it."""
        return make_step(self.plan), abstract_batch(self.plan), HostRows.of(self.plan)

    @property
    def share(self) -> float:
        """Rows of a step over the run's rows of a step."""
        return 1.0

    def _tokens_seen(self, step: int) -> float:
        return float(step * self.plan.tokens_per_step)

    def _compile(self) -> None:
        began = time.monotonic()
        step, batch, self._host = self._program()
        try:
            lowered = step.lower(abstract_state(self.plan), batch)
            devices, options = self.plan.devices, step_options(self.plan)
            ready = load_or_compile(lowered, devices, options, self.plan.run)
            # the jitted function finds the program that was just compiled
            self._compiled = ready.compiled if takes(ready.compiled, self.state) else step
        except jax.errors.JaxRuntimeError as error:
            refuse_option(str(error))
            raise
        seconds = time.monotonic() - began
        why = {"reason": ready.reason} if ready.reason else {}
        event = {"seconds": seconds, "by_plan": ready.by_plan} | why
        self.metrics.event("compile", step=self.start, **event)
        how = "loaded the step that plan compiled" if ready.by_plan else "compiled the train step"
        beside = f" ({ready.reason})" if ready.reason else ""
        self.display.note(f"{how} in {seconds:.1f} s{beside}")
        self._running: jax.Array | None = None
        self.timer = StepTimer(
            round(self.share * self.plan.tokens_per_step),
            self.share * self.plan.flops_per_step,
            peak_flops(self.plan.devices),
        )

    def _step(self, k: int) -> dict[str, jax.Array]:
        with self.timer.waiting():
            rows = self.loader.batch(k)
        self.state, values = self._compiled(self.state, to_device(self.plan, self._host, rows))
        if self._running is not None:
            self._running.block_until_ready()  # the host stays one step ahead, no more
            self.timer.step()
        self._running, self._values = values["loss"], values
        self.display.update(k + 1)
        return values

    def _log(self, step: int, values: dict[str, jax.Array]) -> None:
        measured = {name: float(value) for name, value in values.items()}
        measured |= self.timer.window()
        measured["peak_memory_bytes"] = float(memory_bytes(self.plan.devices))
        measured["tokens_seen"] = self._tokens_seen(step)
        self.metrics.log(step, **measured)
        self.display.update(step, **measured)
        refuse_values(self.plan.run, self.checkpoints, step, measured)

    def _evaluate(self, step: int) -> None:
        weights = eval_weights(self.state)
        with self._paused():
            self.losses = self.held_out.losses(weights)
            samples = self.held_out.samples(weights)
        for loss in self.losses:
            self.metrics.log_eval(
                step,
                loss.source,
                loss=loss.loss,
                ppl=loss.perplexity,
                bits_per_byte=loss.bits_per_byte,
                tokens=loss.tokens,
                rows=loss.rows,
                of_rows=loss.of_rows,
            )
        if self.losses:
            self.display.evaluated(
                step, {loss.source: (loss.loss, loss.rows_text) for loss in self.losses}
            )
        if samples:
            self.metrics.log_samples(step, samples)

    def _save(self, step: int) -> None:
        meta = {"store": self.store.fingerprint, "run": dump_toml(self.plan.run)}
        self.checkpoint(step, self.state, meta)

    def checkpoint(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Starts saving a state. Raises UserError where it, or its step, is not finite."""
        began = time.monotonic()
        with self._paused():
            refuse_values(self.plan.run, self.checkpoints, step, self._values)
            refuse_state(self.plan.run, self.checkpoints, step, state)
            self.checkpoints.save(step, state, meta)
        self._blocked_s = time.monotonic() - began
        self.metrics.event("checkpoint", step=step, blocked_s=self._blocked_s)
        self.display.saved(step)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        timer = getattr(self, "timer", None)
        with self.budget.apart(), timer.paused() if timer else nullcontext():
            yield

    def _end(self, step: int, exit_code: int) -> Outcome:
        began = time.monotonic()
        self.checkpoints.wait()
        if self._blocked_s:
            self.budget.saved(self._blocked_s + time.monotonic() - began)
        self.budget.close(ENDS.get(exit_code, "stopped"))
        return Outcome(step=step, exit_code=exit_code, losses=self.losses)


def opening_line(plan: Plan) -> str:
    """What is trained, for how long and on what."""
    kind, tokens = plan.devices[0].device_kind, plan.tokens_per_step
    return (
        f"{plan.run.name}: {plan.run.model.kind}, {plan.num_params:,} parameters, "
        f"{plan.run.train.steps:,} steps of {tokens:,} tokens on {len(plan.devices)} x {kind}"
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
