"""The loop of a run that trains adapters: that of `train.loop`, with an end of its own for each.

An adapter that has done its steps, or whose held-out loss stopped falling, leaves the batch; the
step is compiled again for the others. The run ends with the last of them.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax

from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.core.batch import Batch
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.held_out import HeldOut
from lmwright.evals.loss import SourceLoss
from lmwright.formats.lora_restore import counts_of, restore
from lmwright.formats.weights import load_base
from lmwright.program.lora import ResolvedAdapter, resolved
from lmwright.program.lora_state import Base, bound, saved
from lmwright.program.lora_step import Lanes, Step, make_step
from lmwright.program.plan import Plan
from lmwright.program.state import abstract_batch
from lmwright.train.budget import Budget
from lmwright.train.display import Display
from lmwright.train.hosts import HostRows
from lmwright.train.loop import Outcome, Session, open_store
from lmwright.train.lora_feed import Feed
from lmwright.train.metrics import MetricsWriter
from lmwright.train.profile import Profiler
from lmwright.train.rundir import claim, keep_tokenizer
from lmwright.train.signals import StopRequest


@dataclass
class Watch:
    """What early stopping knows of an adapter."""

    best: float | None = None
    since_best: int = 0
    stopped: bool = False

    def see(self, loss: float, patience: int | None) -> None:
        """Takes a held-out loss."""
        self.since_best = 0 if self.best is None or loss < self.best else self.since_best + 1
        self.best = loss if self.best is None else min(loss, self.best)
        self.stopped = patience is not None and self.since_best >= patience


def train_adapters(plan: Plan, began: float, stop: StopRequest) -> Outcome:
    """Trains the run's adapters until all are done or it is told to stop; see `train.loop`."""
    run, adapters = plan.run, resolved(plan.run)
    with ExitStack() as stack:
        stores = {one.name: open_store(run, plan, one.data, one.rows) for one in adapters}
        Lanes.of(plan, adapters)  # refuses rows that do not divide
        base = load_base(plan)
        folder = stack.enter_context(claim(run, plan))
        first = stores[adapters[0].name]
        keep_tokenizer(folder, first)
        checkpoints = stack.enter_context(Checkpoints(folder, run.checkpoint))
        state, meta = restore(plan, checkpoints, base)
        refuse_other_data(plan, stores, meta)
        start, counts = int(meta.get("step", 0)), counts_of(state)
        stack.enter_context(jax.set_mesh(plan.mesh))
        left = max(one.steps - counts[one.name] for one in adapters)
        session = AdapterSession(
            plan=plan,
            state=state,
            start=start,
            store=first,
            checkpoints=checkpoints,
            stop=stop,
            budget=Budget.of(run, folder, start, state, began),
            metrics=stack.enter_context(MetricsWriter(folder, run, start or None)),
            display=stack.enter_context(Display(run, start + max(left, 0), start)),
            profiler=stack.enter_context(Profiler(folder, run.metrics.profile_steps)),
            loader=None,
            base=base,
            adapters=adapters,
            stores=stores,
            counts=counts,
            watches={one.name: Watch(**_watched(meta, one.name)) for one in adapters},
            at=start,
        )
        stack.callback(session.close)
        return session.run()


def _watched(meta: dict[str, Any], name: str) -> dict[str, Any]:
    return meta.get("adapters", {}).get(name, {})


def refuse_other_data(plan: Plan, stores: dict[str, TokenStore], meta: dict[str, Any]) -> None:
    """Raises UserError where an adapter goes on with other data than it began with."""
    for name, fingerprint in meta.get("stores", {}).items():
        if name in stores and stores[name].fingerprint != fingerprint:
            raise UserError(
                f"lora.adapters: the prepared data of {name!r} is not what {plan.run.dir} was "
                f"trained on; prepare it as before, or choose another dir="
            )


@dataclass
class AdapterSession(Session):
    """A stretch of a run that trains adapters."""

    base: Base
    adapters: tuple[ResolvedAdapter, ...]
    stores: dict[str, TokenStore]
    counts: dict[str, int]
    """Steps that each adapter has trained."""
    watches: dict[str, Watch]
    at: int
    """Steps that the run has trained."""
    feeding: tuple[str, ...] = field(default=())
    """The adapters that the compiled step is for."""

    @property
    def active(self) -> tuple[ResolvedAdapter, ...]:
        """The adapters that still train."""
        return tuple(one for one in self.adapters if not self._done(one))

    def _done(self, one: ResolvedAdapter) -> bool:
        return self.counts[one.name] >= one.steps or self.watches[one.name].stopped

    @property
    def steps(self) -> int:
        """The step at which the last adapter ends."""
        return self.at + max((one.steps - self.counts[one.name] for one in self.active), default=0)

    @property
    def share(self) -> float:
        """Rows of the adapters that train over the run's rows of a step."""
        rows = sum(one.rows for one in self.active)
        return rows / self.plan.run.train.global_batch_size

    def prepare(self) -> None:
        """One evaluation for each adapter, on its own held-out rows."""
        self.held_out_of = {name: HeldOut(self.plan, s) for name, s in self.stores.items()}

    def close(self) -> None:
        """Ends the feed's threads."""
        if self.loader is not None:
            self.loader.close()

    def _program(self) -> tuple[Step, Batch, HostRows]:
        active = self.active
        lanes = Lanes.of(self.plan, active)
        rows = len(lanes.adapters) * lanes.rows
        host = HostRows.of(self.plan, rows)
        self.close()
        self.loader = Feed(active, self.stores, self.counts, lanes, host, self.at)
        self.feeding = tuple(one.name for one in active)
        return make_step(self.plan, active), abstract_batch(self.plan, rows), host

    def _step(self, k: int) -> dict[str, jax.Array]:
        if self.feeding != tuple(one.name for one in self.active):
            with self.budget.apart():
                self._compile()
        values = super()._step(k)
        for name in self.feeding:
            self.counts[name] += 1
        self.at = k + 1
        return values

    def _evaluation_due(self, done: int) -> bool:
        ended = any(self.counts[one.name] == one.steps for one in self._trained())
        return ended or super()._evaluation_due(done)

    def _trained(self) -> list[ResolvedAdapter]:
        """The adapters of the last step; all of them before there is one."""
        return [one for one in self.adapters if one.name in (self.feeding or self.counts)]

    def _evaluate(self, step: int) -> None:
        """Held-out losses and samples of each adapter that trained in this step."""
        self.losses = []
        for one in self._trained():
            prefix = f"{one.name}/" if len(self.adapters) > 1 else ""
            held_out, weights = self.held_out_of[one.name], bound(self.plan, self.state, one.name)
            with self._paused():
                losses = held_out.losses(weights)
                samples = held_out.samples(weights)
            self._note(step, prefix, losses, samples)
            tokens = sum(loss.tokens for loss in losses)
            if tokens:
                mean = sum(loss.loss * loss.tokens for loss in losses) / tokens
                self._watch(step, one, mean)

    def _note(
        self, step: int, prefix: str, losses: list[SourceLoss], samples: list[dict[str, Any]]
    ) -> None:
        for loss in losses:
            self.metrics.log_eval(
                step,
                prefix + loss.source,
                loss=loss.loss,
                ppl=loss.perplexity,
                bits_per_byte=loss.bits_per_byte,
                tokens=loss.tokens,
                rows=loss.rows,
                of_rows=loss.of_rows,
            )
        self.losses += losses
        if losses:
            found = {prefix + loss.source: (loss.loss, loss.rows_text) for loss in losses}
            self.display.evaluated(step, found)
        if samples:
            named = [s | {"prompt": f"{prefix} {s['prompt']}".strip()} for s in samples]
            self.metrics.log_samples(step, named)

    def _watch(self, step: int, one: ResolvedAdapter, loss: float) -> None:
        watch = self.watches[one.name]
        watch.see(loss, one.patience)
        if watch.stopped and self.counts[one.name] < one.steps:
            self.metrics.event("adapter stopped", step=step, adapter=one.name, best_loss=watch.best)
            self.display.note(f"{one.name}: stopped: its held-out loss no longer falls")

    def _tokens_seen(self, step: int) -> float:
        seen = sum(one.rows * self.counts[one.name] for one in self.adapters)
        return float(seen * self.plan.seq_len)

    def _save(self, step: int) -> None:
        self.checkpoint(
            step,
            saved(self.state),
            {
                "stores": {name: store.fingerprint for name, store in self.stores.items()},
                "base": {"path": self.base.path, "hash": self.base.hash},
                "adapters": {name: vars(watch) for name, watch in self.watches.items()},
                "run": dump_toml(self.plan.run),
            },
        )
