"""The compiled step of a session: for the trainees that still train, with the rows it reads."""

import time
from collections.abc import Callable, Mapping
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
from lmwright.train.hooks import Values
from lmwright.train.hosts import HostRows
from lmwright.train.throughput import StepTimer, peak_flops


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

    @classmethod
    def of(
        cls, plan: Plan, state: Tree, active: tuple[Trainee, ...],
        stores: Mapping[str, TokenStore], counts: Mapping[str, int], at: int,
    ) -> "CompiledStep":  # fmt: skip
        """Compiles the step for `active` trainees, whose rows after step `at` are read meanwhile.
        Raises UserError for compiler options that do not exist."""
        lanes = Lanes.of(plan, active)
        num_rows = len(lanes.trainees) * lanes.rows
        host = HostRows.of(plan, num_rows)
        feed = Feed(active, stores, counts, lanes, host, at)
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

    def __call__(self, state: Tree, k: int) -> tuple[Batch, Tree, Values]:
        """Batch `k`, and the state and the values of the step that reads it."""
        began = time.monotonic()
        with self.timer.waiting():
            rows = self.feed.batch(k)
        place = partial(self.host.place, self.plan)  # each host gives its own rows
        batch = Batch(**{name: place(rows[name]) for name in Batch.__dataclass_fields__})
        state, values = self.program(state, batch)
        beat("step", host_ms=round(1000 * (time.monotonic() - began)))
        if self.running is not None:
            self.running.block_until_ready()  # the host stays one step ahead, no more
            self.timer.step()
        self.running = values["loss"]
        return batch, state, values
