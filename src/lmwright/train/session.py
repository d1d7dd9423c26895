"""A session of a run: makes the parts of the loop from what the run says, and runs it.

run --> plan, data, checkpoints, state --> `train.loop` --> outcome
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from lmwright.checkpoint.memory import MemoryTier
from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.data.rows.loader import RowsAway
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.vocabulary import note_unused
from lmwright.errors import UserError
from lmwright.formats.weights import load_frozen
from lmwright.guard.heartbeat import beat
from lmwright.program.executable import refuse_options
from lmwright.program.length import completed, of_rows
from lmwright.program.plan import Plan, resolve
from lmwright.program.state import counts_of, saved
from lmwright.program.step import Lanes
from lmwright.program.stores import open_stores
from lmwright.program.trainee import Frozen, Trainee
from lmwright.train.agreement import refuse_other_runs, refuse_other_stores
from lmwright.train.budget import Budget
from lmwright.train.compiled import CompiledStep
from lmwright.train.corruption import checking
from lmwright.train.display import Display, headline
from lmwright.train.early_stop import EarlyStop
from lmwright.train.evaluated import HeldOutOfAll
from lmwright.train.gradient_error import GradientErrors
from lmwright.train.hooks import HOOKS, Hook
from lmwright.train.host_memory import refuse_small_host
from lmwright.train.loop import Loop, Outcome
from lmwright.train.memory import keeping
from lmwright.train.metrics import MetricsWriter
from lmwright.train.passed import PassedSteps
from lmwright.train.portions import waiting
from lmwright.train.profile import Profiler
from lmwright.train.publishing import publishing
from lmwright.train.rundir import KeepClaim, claim, describe, keep_tokenizer
from lmwright.train.signals import StopRequest
from lmwright.train.skips import Skips
from lmwright.train.start import refuse_start, restore_or_init, starting_note
from lmwright.train.trackers import refuse_missing


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
        plan, why = _planned(run, devices or jax.devices())
        stop.starting = stop.starting and jax.process_count() == 1
        plan, stores = _with_stores(plan)  # before the claim: a refusal leaves no folder behind
        trainees = plan.training.trainees
        frozen = _frozen(plan, stores[trainees[0].name])
        folder = stack.enter_context(claim(run, plan))
        path = folder.path
        keep_tokenizer(path, stores[trainees[0].name])
        passed = PassedSteps(path)
        checkpoints = stack.enter_context(Checkpoints(
            path, run.checkpoint, keep_due=run.train.skip_spikes == "rollback",
            without_effect=passed.within, before_commit=folder.push,
        ))  # fmt: skip
        tier = MemoryTier(path) if run.checkpoint.memory_every_steps else None
        state, meta = restore_or_init(plan, checkpoints, stores, frozen, tier, passed)
        start, counts = int(meta.get("step", 0)), counts_of(state)
        beat("restore", step=start, saved=start)
        stack.enter_context(jax.set_mesh(plan.mesh))
        metrics = stack.enter_context(MetricsWriter(path, run, passed.reached(start) or None))
        describe(run, plan, folder)
        display = stack.enter_context(
            Display(run, start + _left(trainees, counts), start, stop=stop)
        )
        _describe(plan, stores, display, why, _note(path, start, trainees, counts))
        facts, checks = _facts(run, stores, frozen), checking(plan)
        own = (
            *keeping(run, tier, checks), *waiting(stores, meta, facts),
            GradientErrors(plan, stores), KeepClaim(folder),
            Skips(plan, checkpoints, frozen, passed), *checks, *publishing(run, path, stack),
        )  # fmt: skip
        loop = Loop(
            plan=plan, state=state, start=start, counts=counts, passed=passed, facts=facts,
            early_stops=_early_stops(trainees, meta), unevaluated=_unevaluated(trainees, meta),
            compile=partial(CompiledStep.of, plan, stores, partial(_asked_alone, stop)),
            evaluator=HeldOutOfAll(plan, stores, metrics, display),
            checkpoints=checkpoints,
            budget=Budget.of(run, path, start, saved(state), began),
            metrics=metrics,
            display=display,
            profiler=stack.enter_context(Profiler(path, run.metrics.profile_steps)),
            stop=stop,
            hooks=(*own, *HOOKS, *hooks),
        )  # fmt: skip
        return _outcome(stack.enter_context(closing(loop)))


def _asked_alone(stop: StopRequest) -> bool:
    """True for a process that was asked to stop and may do so without others."""
    return stop.exit_code is not None and jax.process_count() == 1


def _outcome(loop: Loop) -> Outcome:
    """Outcome of a loop; one whose rows stay away ends with the step before, which is saved."""
    try:
        return loop.run()
    except RowsAway as away:
        if away.__cause__ is None:
            loop.display.note(f"the rows of step {loop.at + 1} did not come")
            return loop.stopped(loop.at)
        alone = jax.process_count() == 1  # others would have to save with this one
        if alone and loop.at > loop.start:
            loop.stopped(loop.at)
        raise away.__cause__ from None


def _planned(run: Run, devices: Sequence[jax.Device]) -> tuple[Plan, str]:
    """The plan of a run on devices, and a sentence about what GPUs choose for it. Refuses other
    runs of other processes."""
    refuse_other_runs(run)
    refuse_options(run, devices[0].platform)
    if devices[0].platform != "gpu":
        return resolve(run, devices), ""
    from lmwright.planner.analytic.remat import settled_here

    choice = settled_here(run, devices)
    return resolve(choice.run, devices), choice.note


def _with_stores(plan: Plan) -> tuple[Plan, dict[str, TokenStore]]:
    """The plan for the rows that are prepared, and the data of each trainee. Refuses a host that is
    too small, trackers that the first process lacks, and data that the run cannot train on."""
    refuse_small_host(plan)
    if jax.process_index() == 0:
        refuse_missing(plan.run)
    stores = open_stores(plan)
    refuse_other_stores(stores)
    plan, trainees = of_rows(plan, stores.values()), plan.training.trainees
    Lanes.of(plan, trainees)  # refuses rows that do not divide
    refuse_start(plan, stores[trainees[0].name])
    _refuse_patience(plan, stores)
    return plan, stores


def _refuse_patience(plan: Plan, stores: dict[str, TokenStore]) -> None:
    """Raises UserError where an adapter is to stop by held-out losses that are never computed.
    Only `train` asks: runs of earlier versions, which said nothing, are still read."""
    for trainee in plan.training.trainees:
        if trainee.patience is None:
            continue
        why = f"lora.adapters: the patience of {trainee.name!r} has no effect, since"
        if plan.run.eval.every_steps is None:
            raise UserError(
                f"{why} held-out losses are computed only at the end; set eval.every_steps, or "
                "leave it out"
            )
        if not stores[trainee.name].eval_sources:
            raise UserError(
                f"{why} nothing is held out in {stores[trainee.name].place.name('pack')}; set "
                "data.holdout_fraction and prepare again, or leave it out"
            )


def _frozen(plan: Plan, store: TokenStore) -> Frozen:
    """The frozen weights, with a teacher where there is one."""
    frozen = load_frozen(plan)
    if not plan.run.objective.has_teacher:
        return frozen
    from lmwright.train.teacher import with_teacher

    return with_teacher(plan, frozen, store)


def _left(trainees: Sequence[Trainee], counts: dict[str, int]) -> int:
    """Steps until the last trainee ends."""
    return max(0, *(trainee.steps - counts[trainee.name] for trainee in trainees))


def _note(path: Path, start: int, trainees: Sequence[Trainee], counts: dict[str, int]) -> str:
    """A sentence about where the weights start, or that all steps that are asked for are done."""
    if not start:
        return starting_note(path)
    over = next((t for t in trainees if counts[t.name] > t.steps), None)
    if over is None or _left(trainees, counts):
        return ""
    return (
        f"{counts[over.name]} steps are done already, and {over.steps} are asked for: nothing is "
        "trained; set a larger train.steps to train on"
    )


def _early_stops(trainees: Sequence[Trainee], meta: dict[str, Any]) -> dict[str, EarlyStop]:
    """The held-out losses of each trainee up to a saved state with this `meta`."""
    losses, stops = meta.get("trainees", {}), {}
    for trainee in trainees:
        stops[trainee.name] = early = EarlyStop(**losses.get(trainee.name, {}))
        early.judge(trainee.patience)
    return stops


def _unevaluated(trainees: Sequence[Trainee], meta: dict[str, Any]) -> list[str]:
    """Names of trainees of an evaluation that was broken off before a state with this `meta`."""
    return [t.name for t in trainees if t.name in meta.get("unevaluated", ())]


def _note_no_evals(run: Run, stores: dict[str, TokenStore]) -> str:
    """A sentence for a run that is to compute held-out losses and has no rows for them."""
    said = {"every_steps": run.eval.every_steps, "first": run.eval.first == "start"}
    asked = next((name for name, value in said.items() if value), None)
    if asked is None or any(store.eval_sources for store in stores.values()):
        return ""
    return f"nothing is held out, so eval.{asked} computes no held-out loss"


def _facts(run: Run, stores: dict[str, TokenStore], frozen: Frozen) -> dict[str, Any]:
    """Facts that go with every saved state."""
    teacher = {"teacher": frozen.teacher} if frozen.teacher else {}
    return {
        "stores": {name: store.fingerprint for name, store in stores.items()},
        "frozen": {"path": frozen.path, "hash": frozen.hash} | teacher,
        "run": dump_toml(run),
    }


def _describe(plan: Plan, stores: dict[str, TokenStore], display: Display, *notes: str) -> None:
    """Prints what is trained, notes on what was chosen and where it starts, and what of it no token
    uses."""
    run, store = plan.run, stores[plan.training.trainees[0].name]
    for line in filter(None, (headline(plan), *notes, _note_no_evals(run, stores))):
        display.note(line)
    if run.train.init_from is None and not plan.training.freezes:
        unused = note_unused(run.model, run.data.dir, store.vocab_size)
        if unused:
            display.note(unused)
