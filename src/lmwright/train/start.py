"""The state that a session starts from: a saved one, or a fresh one with the weights of
`train.init_from` or randomly initialized ones."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lmwright.checkpoint.files import root_of
from lmwright.checkpoint.memory import MemoryTier
from lmwright.checkpoint.store import Checkpoints
from lmwright.config.run import Run, Shuffle
from lmwright.core.param import Tree, count_params, init_weights, nest, walk
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from lmwright.errors import UserError
from lmwright.formats.open import Origin, open_origin, open_place
from lmwright.formats.tokenizer_files import open_tokenizer
from lmwright.formats.train_state import init_state, restore, restore_near
from lmwright.formats.weights import (
    added_weights,
    fresh_weights,
    placed_weights,
    taken_spec,
)
from lmwright.guard.files import write_whole
from lmwright.optim.other_kinds import Adafactor
from lmwright.program.plan import Plan
from lmwright.program.state import fresh_part, saved, saved_shardings
from lmwright.program.stores import refuse_other_data
from lmwright.program.trainee import Frozen
from lmwright.storage.bucket import Bucket, is_bucket
from lmwright.storage.mirror import mirror_folder
from lmwright.train.metrics import METRICS_FILE
from lmwright.train.passed import PassedSteps

INIT_FILE = "init.json"


def restore_or_init(
    plan: Plan,
    checkpoints: Checkpoints,
    stores: Mapping[str, TokenStore],
    frozen: Frozen,
    tier: MemoryTier | None,
    passed: PassedSteps,
) -> tuple[Tree, dict[str, Any]]:
    """The newest intact state and its meta, or a fresh one and an empty meta; the steps that the
    meta knows to be without effect are added to `passed`. A state of the host's memory is saved."""
    newest = max(checkpoints.steps(), default=0)
    near = restore_near(plan, tier, newest, frozen) if tier is not None else None
    if near is not None and passed.within(near[1]["step"]):
        near = None
    restored = near or restore(plan, checkpoints, frozen)
    if restored is None:
        first = stores[plan.training.trainees[0].name]
        return first_state(plan, first, frozen), {}
    state, meta = restored
    refuse_other_data(plan, stores, meta["stores"])
    for pair in meta.get("passed", ()):
        passed.add(*pair)
    _refuse_end(plan, passed, meta["step"])
    if near is not None:  # the session may end before a step, and be the last on this machine
        checkpoints.save(meta["step"], saved(state), meta)
    return state, meta


def _refuse_end(plan: Plan, passed: PassedSteps, step: int) -> None:
    """Raises UserError for a run that goes on after `step` and would end among passed steps."""
    end = max(trainee.steps for trainee in plan.training.trainees)
    for first, last in passed.ranges:
        if step < first <= end <= last:
            raise UserError(
                f"train.steps: {end} is one of the steps {first} to {last}, which this run passes "
                f"over since a spike; set {last + 1} or more, or {first - 1} at most"
            )


def refuse_start(plan: Plan, store: TokenStore) -> None:
    """UserError for a place of `train.init_from` whose weights or tokenizer do not fit, for rounded
    weights that no file can hold, for adapters that would not move and for settings without effect,
    before a new run directory is made. Frozen weights are read before that, too."""
    run, train = plan.run, plan.run.train
    if _is_begun(run.dir):
        return
    _refuse_relative_steps(run)
    _refuse_idle(run)
    if run.qat is not None:
        _refuse_grid(run)
    if train.init_from is None or plan.training.freezes:
        return
    try:
        origin = open_origin(train.init_from, plan.run.model)
        if train.init_parts:
            from lmwright.formats.part_weights import parts_of

            parts_of(plan, origin, store)
            return
        refuse_tokenizer(origin, store)
        if not plan.run.objective.parts:
            taken_spec(plan, origin, fresh_weights(plan, origin), added_weights(plan, origin))
    except UserError as error:
        where = "init_parts" if train.init_parts else "init_from"
        raise error.at(f"train.{where}") from error


def _refuse_relative_steps(run: Run) -> None:
    """Raises UserError for steps by a weight's own size where a factor of an adapter begins at
    zero."""
    relative = getattr(run.optim, "step_size", "") == "relative"
    if relative and run.lora is not None and any(a.init_from is None for a in run.lora.listed):
        raise UserError(
            'optim.step_size: "relative" moves a weight by its own size, and the second factor of '
            'a fresh adapter is zero, so that it would hardly learn; set "absolute"'
        )


def _refuse_idle(run: Run) -> None:
    """Raises UserError for settings that others make useless. Only new runs are asked: earlier
    versions said nothing."""
    optim, shuffle = run.optim, run.data.shuffle
    if isinstance(optim, Adafactor) and optim.step_size == "absolute":
        if optim.min_weight_rms != Adafactor.min_weight_rms:
            raise UserError(
                'optim.min_weight_rms: has no effect with step_size = "absolute"; leave it out'
            )
    if shuffle.order != "written" and shuffle.epochs != Shuffle.epochs:
        raise UserError(
            f'data.shuffle.epochs: has no effect with order = "{shuffle.order}"; set "written" to '
            f"write out {shuffle.epochs}, or train.epochs to train so many passes"
        )


def _refuse_grid(run: Run) -> None:
    """Raises UserError for rounded weights that no file of the model holds."""
    from lmwright.formats.encoding import refuse_packed
    from lmwright.formats.gguf_read import refuse_blocks

    assert run.qat is not None
    if run.qat.weights == "q4_0":
        refuse_blocks(run.model, "qat.weights")
    else:
        try:
            refuse_blocks(run.model, "")
            cure = "use 'q4_0', which is for .gguf files"
        except UserError:
            cure = "no other is, either, so remove [qat]"
        refuse_packed(run.qat.weights, run.model, "qat.weights", cure)


def _is_begun(run_dir: str) -> bool:
    """True for a run directory that is there."""
    if is_bucket(run_dir):
        return Bucket(run_dir).entry("run.toml") is not None
    return Path(run_dir, "run.toml").exists()


def first_state(plan: Plan, store: TokenStore, frozen: Frozen) -> Tree:
    """A fresh state around what is frozen, or one with the weights of `train.init_from`, which is
    then written down in the run directory. Raises UserError for another model or tokenizer
    there."""
    path = plan.run.train.init_from
    if path is None or plan.training.freezes:
        new = plan.run.objective.new_weights if path else ()
        if fresh := [name for name in new if name not in frozen.whole]:
            _write_down(plan, {"path": frozen.path, "fresh": fresh})
        return init_state(plan, frozen)
    beside = _beside(plan, store)
    try:
        origin = open_origin(path, plan.run.model)
        if not plan.run.train.init_parts:
            refuse_tokenizer(origin, store)
        state, facts = _started(plan, origin, store, beside)
    except UserError as error:
        where = "init_parts" if plan.run.train.init_parts else "init_from"
        raise error.at(f"train.{where}") from error
    known = {
        "path": str(path),
        "kind": origin.kind,
        "checkpoint": origin.step,
        "num_params": count_params(origin.model.spec()),
        "tokenizer_fingerprint": store.tokenizer_fingerprint,
    }
    _write_down(plan, known | facts)
    return state | {"frozen": frozen.weights}


def _beside(plan: Plan, store: TokenStore) -> list[Origin]:
    """The places of weights that the objective names beside `train.init_from`."""
    places = []
    for field, path in plan.run.objective.starts_from.items():
        try:
            places.append(place := open_place(path))
            refuse_tokenizer(place, store)
        except UserError as error:
            raise error.at(field) from error
    return places


def _started(
    plan: Plan, origin: Origin, store: TokenStore, beside: list[Origin]
) -> tuple[Tree, dict[str, Any]]:
    """The state around the weights of places, and what is to be said of it."""
    if plan.run.train.init_parts:
        from lmwright.formats.part_weights import weights_with_parts

        with jax.set_mesh(plan.mesh):
            weights, fresh, said = weights_with_parts(plan, origin, store)
            return _state_around(plan, weights), {"fresh": fresh, "said": said}
    if not plan.run.objective.parts:
        return state_from(plan, origin), {"fresh": list(fresh_weights(plan, origin))}
    from lmwright.formats.two_parts import two_parts

    with jax.set_mesh(plan.mesh):
        weights, fresh, said = two_parts(plan, origin, *beside)
        return _state_around(plan, weights), {"fresh": fresh, "said": said}


def _write_down(plan: Plan, facts: dict[str, Any]) -> None:
    if jax.process_index() == 0:
        write_whole(mirror_folder(plan.run.dir) / INIT_FILE, json.dumps(facts, indent=1) + "\n")


def state_from(plan: Plan, origin: Origin) -> Tree:
    """The state before the first step around the origin's weights, on the plan's devices.

    Weights of a head that it does not have start fresh. Raises UserError where the plan's model
    has other weights.
    """
    fresh = fresh_weights(plan, origin)
    added = added_weights(plan, origin)
    old = taken_spec(plan, origin, fresh, added)
    with jax.set_mesh(plan.mesh):
        weights = placed_weights(origin, plan.shardings)
        weights = {name: tree for name, tree in weights.items() if name in old}
        if fresh:
            weights |= _fresh_weights(plan, fresh)
        if added:
            whole = dict(walk(_fresh_weights(plan, list(plan.spec))))
            own = ((path, whole[path]) for path in added)
            weights = nest((*walk(weights), *own))
        return _state_around(plan, weights)


def _state_around(plan: Plan, weights: Tree) -> Tree:
    """The state before the first step around weights, which are donated."""
    (trainee,) = plan.training.trainees

    def build(weights: Tree) -> Tree:
        part = fresh_part(plan, trainee, weights)
        return {"step": jnp.zeros((), jnp.int32), "trained": {trainee.name: part}}

    make = jax.jit(build, out_shardings=saved_shardings(plan), donate_argnums=0)
    return make(weights) | {"frozen": {}}


def _fresh_weights(plan: Plan, names: Sequence[str]) -> Tree:
    """Some of the plan's weights as a fresh state has them, on its devices."""
    spec, where = ({name: tree[name] for name in names} for tree in (plan.spec, plan.shardings))
    make = jax.jit(partial(init_weights, spec), out_shardings=where)
    return make(jax.random.key(plan.run.seed))


def has_trained(folder: Path) -> bool:
    """True for a directory whose run has measured or saved something."""
    metrics = folder / METRICS_FILE
    return bool(metrics.exists() and metrics.stat().st_size) or has_checkpoints(folder)


def has_checkpoints(folder: Path) -> bool:
    """True for a directory with checkpoints, be they damaged and put aside."""
    root = root_of(folder)
    return bool(root.steps()) or root.any_aside()


def forget_start(folder: Path) -> None:
    """Removes what a start that failed wrote down, which may have had other settings."""
    if (folder / "run.toml").exists():  # which is no user's own
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        for name in (INIT_FILE, "run.toml"):
            (folder / name).unlink(missing_ok=True)


def starting_note(run_dir: Path) -> str:
    """A sentence about where two models start, or about the weights that start fresh beside those
    of `train.init_from`; empty where there is nothing to say."""
    try:
        facts = json.loads((run_dir / INIT_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    fresh = facts.get("fresh")
    more = [facts["said"]] if facts.get("said") else []
    more += [f"fresh ones for {', '.join(fresh)}"] if fresh else []
    return "; ".join([f"weights of {facts['path']}", *more]) if more else ""


def refuse_tokenizer(origin: Origin, store: TokenStore) -> None:
    """UserError unless every token of the origin's tokenizer has the same id in the store's;
    the store's may have more."""
    if origin.tokenizer_path is None:
        return
    theirs = open_tokenizer(origin.tokenizer_path)
    if theirs.fingerprint == store.tokenizer_fingerprint:
        return
    ours = load_tokenizer(store.tokenizer_dir)
    if _ids(theirs).items() <= _ids(ours).items() and _probe(theirs) == _probe(ours):
        return
    raise UserError(
        f"{origin.path} uses another tokenizer than the data in {store.place.name('tokenizer')}; "
        f"set data.tokenizer.path = {str(origin.tokenizer_path)!r} and prepare again"
    )


def _ids(tokenizer: TextTokenizer) -> dict[str, int]:
    return tokenizer.backend.get_vocab(with_added_tokens=True)


def _probe(tokenizer: TextTokenizer) -> list[list[int]]:
    return tokenizer.encode_batch(PROBE)
