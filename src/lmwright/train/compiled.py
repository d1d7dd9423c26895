"""The compiled step of a session: for the trainees that still train, with the rows it reads."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import jax

from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.rows.store import TokenStore
from lmwright.guard.heartbeat import beat
from lmwright.program.executable import Ready, load_or_compile, refuse_option, takes
from lmwright.program.plan import Plan, step_options
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import Lanes, make_step
from lmwright.program.trainee import Trainee
from lmwright.train.feed import Feed
from lmwright.train.hosts import HostRows
from lmwright.train.parts import Values
from lmwright.train.throughput import StepTimer, memory_bytes, peak_flops


@dataclass
class CompiledStep:
    """A step for some trainees."""

    plan: Plan
    names: tuple[str, ...]  # of the trainees
    host: HostRows
    feed: Feed
    program: Callable[[Tree, Batch], tuple[Tree, Values]]
    ready: Ready  # where the program came from
    timer: StepTimer
    running: jax.Array | None = None  # of the last step, which may not be done
    waited_before_s: float = 0.0  # for rows of the next step

    @classmethod
    def of(
        cls, plan: Plan, stores: Mapping[str, TokenStore], asked: Callable[[], bool], state: Tree,
        active: Sequence[Trainee], counts: Mapping[str, int], at: int,
    ) -> "CompiledStep":  # fmt: skip
        """Compiles the step for `active` trainees, whose rows after step `at` are read meanwhile;
        `asked` tells whether the session was asked to stop.
        Raises UserError for compiler options that do not exist."""
        lanes = Lanes.of(plan, active)
        num_rows = len(lanes.trainees) * lanes.rows
        host = HostRows.of(plan, num_rows)
        feed = Feed(active, stores, counts, lanes, host, at, asked)
        step = make_step(plan, active)
        try:
            lowered = step.lower(abstract_state(plan), abstract_batch(plan, num_rows))
            ready = load_or_compile(lowered, plan.devices, step_options(plan), plan.run)
        except BaseException as error:
            feed.close()
            if isinstance(error, jax.errors.JaxRuntimeError):
                refuse_option(str(error))
            raise
        share = sum(trainee.rows for trainee in active) / plan.run.train.global_batch_size
        tokens, flops = round(share * plan.tokens_per_step), share * plan.flops_per_step
        # the jitted function finds the program that was just compiled
        program = ready.compiled if takes(ready.compiled, state) else step
        timer = StepTimer(tokens, flops, peak_flops(plan.devices))
        names = tuple(trainee.name for trainee in active)
        return cls(plan, names, host, feed, program, ready, timer)

    @property
    def by_plan(self) -> bool:
        """True if `plan` had compiled it."""
        return self.ready.by_plan

    @property
    def reason(self) -> str:
        """Reason why it was compiled although `plan` had; empty where it had not."""
        return self.ready.reason

    def late(self, k: int) -> bool:
        """True if batch `k` is not there, nor comes in a moment."""
        with self.timer.waiting():
            late = self.feed.late(k)
        self.waited_before_s += self.timer.waited_s
        return late

    @property
    def waited_s(self) -> float:
        """Seconds that the latest step waited for its rows."""
        return self.timer.waited_s

    def measured(self) -> dict[str, float]:
        """Speed and memory since the last call, under their names in metrics.jsonl."""
        return self.timer.window() | {"peak_memory_bytes": float(memory_bytes(self.plan.devices))}

    def paused(self) -> AbstractContextManager[None]:
        """Context in which time belongs to no step."""
        return self.timer.paused()

    def finish(self) -> None:
        """Raises UserError for a store that is found to be altered at the end of a run."""
        self.feed.finish()

    def close(self) -> None:
        """Ends the threads that read rows."""
        self.feed.close()

    def __call__(self, state: Tree, k: int) -> tuple[Batch, Tree, Values]:
        """Batch `k`, and the state and the values of the step that reads it."""
        began = time.monotonic()
        with self.timer.waiting():
            rows = self.feed.batch(k)
        self.timer.waited_s += self.waited_before_s
        self.waited_before_s = 0.0
        place = partial(self.host.place, self.plan)  # each host gives its own rows
        batch = Batch(**{name: place(rows[name]) for name in Batch.__dataclass_fields__})
        state, values = self.program(state, batch)
        beat("step", host_ms=round(1000 * (time.monotonic() - began)))
        if self.running is not None:
            self.running.block_until_ready()  # the host stays one step ahead, no more
            self.timer.step()
        self.running = values["loss"]
        return batch, state, values
