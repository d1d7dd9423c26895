"""The state of a run out of its checkpoints, or a fresh one around what is frozen.

    checkpoint   {"step": ..., "trained": {name: {"weights", "optimizer", "ema", "skipped"}}}
    earlier      the same without "skipped", which is then zero
    earlier      {"step": ..., "weights": ..., "optimizer": ..., "ema": ...}, each of them by name
                 where the run trained adapters

A run may have gained adapters since the checkpoint (they start fresh) or lost some (they are
left out); what is frozen must be what they were trained beside.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.checkpoint.memory import MemoryTier
from lmwright.checkpoint.saved import SavedStates
from lmwright.core.contract import HfModel
from lmwright.core.param import Tree, at, nest, walk
from lmwright.errors import UserError
from lmwright.formats.adapter_note import refuse_other_base
from lmwright.formats.peft import read_adapter
from lmwright.formats.tensor_hash import weights_hash
from lmwright.program import state as program_state
from lmwright.program.lora import ResolvedAdapter
from lmwright.program.lora_section import DEFAULT
from lmwright.program.plan import Plan
from lmwright.program.state import abstract_state, part_shardings, saved
from lmwright.program.trainee import MODEL, Frozen, Trainee

PARTS = ("weights", "optimizer", "ema")
COUNTS = ("skipped", "recent")  # parts that checkpoints of earlier versions lack


def restore(
    plan: Plan, checkpoints: SavedStates, frozen: Frozen, step: int | None = None
) -> tuple[Tree, dict[str, Any]] | None:
    """The state around `frozen` and the meta of the newest checkpoint, or of that of a step; None
    where there is none.

    Raises UserError where other weights were frozen.
    """
    wanted = saved(abstract_state(plan))
    abstract = lambda shapes: _in_checkpoint(plan, shapes, wanted)  # noqa: E731
    if step is None:
        restored = checkpoints.restore(abstract)
    else:
        restored = checkpoints.restore_at(step, abstract)
    if restored is None:
        return None
    state, meta = restored
    meta = today(meta)
    _refuse_other_frozen(plan, frozen, meta)
    trained, fresh = by_name(state), {}
    if wanted["trained"].keys() - trained.keys():
        fresh = init_state(plan, frozen)["trained"]
    trained = {
        name: _with_counts(wanted["trained"][name], trained[name])
        if name in trained
        else fresh[name]
        for name in wanted["trained"]
    }
    return {"step": state["step"], "frozen": frozen.weights, "trained": trained}, meta


def restore_near(
    plan: Plan, tier: MemoryTier, newer_than: int, frozen: Frozen
) -> tuple[Tree, dict[str, Any]] | None:
    """Restores as `restore` does, from the memory of the hosts; None unless all of them have a
    newer state there."""
    restored = tier.restore(saved(abstract_state(plan)), newer_than)
    if restored is None:
        return None
    state, meta = restored
    _refuse_other_frozen(plan, frozen, meta)
    return {**state, "frozen": frozen.weights}, meta


def today(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of a checkpoint under today's names: `stores`, `frozen`, `trainees`."""
    earlier = {"stores": {MODEL: meta["store"]}} if "store" in meta else {}
    earlier |= {"frozen": meta["base"]} if "base" in meta else {}
    earlier |= {"trainees": meta["adapters"]} if "adapters" in meta else {}
    return {"stores": {}, "frozen": {}, "trainees": {}, **earlier, **meta}


def _refuse_other_frozen(plan: Plan, frozen: Frozen, meta: dict[str, Any]) -> None:
    base = meta["frozen"]
    if plan.training.freezes and base.get("hash") != frozen.hash:
        raise UserError(
            f"train.init_from: {frozen.path or frozen.hash} is not the base that the adapters in "
            f"{plan.run.dir} were trained on ({base.get('path') or base.get('hash')}); "
            f"point to that one"
        )
    if frozen.teacher and base.get("teacher", frozen.teacher) != frozen.teacher:
        raise UserError(
            f"objective.teacher: has other weights than the teacher that {plan.run.dir} learned "
            "from; point to that one"
        )


def by_name(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{name: part} of a checkpoint's state, or of its shapes."""
    if "trained" in tree:
        return dict(tree["trained"])
    kinds = [kind for kind in PARTS if kind in tree]
    if _of_one(tree):
        return {MODEL: {kind: tree[kind] for kind in kinds}}
    return {name: {kind: tree[kind][name] for kind in kinds} for name in tree["weights"]}


def _of_one(tree: Mapping[str, Any]) -> bool:
    """True for an earlier state of a run that trained all weights."""
    count = tree["optimizer"].get("count")
    return count is not None and not isinstance(count, Mapping)


def _with_counts(wanted: Tree, part: Tree) -> Tree:
    """A trainee's part with the counts that checkpoints of earlier versions lack, and without those
    that the run does not keep any more."""
    zeros = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)  # noqa: E731
    return {
        kind: part[kind] if kind in part else jax.tree.map(zeros, tree)
        for kind, tree in wanted.items()
    }


def _counted_alike(ours: Tree, theirs: Tree) -> Tree:
    """A trainee's part in the form that the run wants, with the counts that the checkpoint has."""
    counts = {kind: ours.get(kind, theirs[kind]) for kind in COUNTS if kind in theirs}
    return {kind: tree for kind, tree in ours.items() if kind not in COUNTS} | counts


def _in_checkpoint(plan: Plan, shapes: Any, wanted: Tree) -> Tree:
    """The state to read, in the form of the checkpoint: trainees in both as the run wants them,
    others as they were saved."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    ours, trained = wanted["trained"], {}

    def as_saved(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    for name, part in by_name(shapes).items():
        saved = jax.tree.map(as_saved, _plain(part))
        trained[name] = _counted_alike(ours[name], saved) if name in ours else saved
    if MODEL in ours:  # which no run gains: that it is missing is told as a difference
        trained.setdefault(MODEL, ours[MODEL])
    step = {"step": wanted["step"]}
    if "trained" in shapes:
        return step | {"trained": trained}
    if _of_one(shapes):
        return step | trained[MODEL] if MODEL in trained else step
    kinds = [kind for kind in PARTS if any(kind in part for part in trained.values())]
    return step | {
        kind: {name: part[kind] for name, part in trained.items() if kind in part} for kind in kinds
    }


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _plain(inner) for name, inner in tree.items()}
    return tree


def pick(plan: Plan, name: str | None) -> Trainee:
    """The trainee of a name, or the only one. Raises UserError where that is not clear."""
    trainees = {t.name: t for t in plan.training.trainees}
    if name is None and len(trainees) == 1:
        return next(iter(trainees.values()))
    if not plan.training.freezes:
        raise UserError(f"{plan.run.dir}: trained all weights and has no adapters; remove {name!r}")
    if name not in trainees:
        listed = ", ".join(trainees)
        what = f"no adapter is called {name!r}" if name else "it has several adapters"
        raise UserError(f"{plan.run.dir}: {what}; choose with --adapter: {listed or DEFAULT}")
    return trainees[name]


def init_state(plan: Plan, frozen: Frozen | None) -> Tree:
    """A fresh state around what is frozen; adapters that start from PEFT folders, or with a head
    of their base's, have read them."""
    state, objective = program_state.init_state(plan, frozen), plan.run.objective
    whole = frozen.whole if frozen is not None else {}
    for trainee in plan.training.trainees:
        if trainee.init_from is None and not whole:
            continue
        part = state["trained"][trainee.name]
        weights = part["weights"] | whole
        try:
            if trainee.init_from is not None:
                model, _ = objective.exported(plan.run.model, plan.spec)
                weights = _read_adapter(model, trainee, frozen)
        except UserError as error:
            listed = plan.training.listed
            section = f"{listed}[{trainee.name!r}]" if listed else "lora"
            raise error.at(f"{section}.init_from") from error
        where, fresh = part_shardings(plan, trainee)["weights"], part["weights"]
        part["weights"] = jax.device_put(weights, where)
        if trainee.init_from is not None:
            both = _with_fresh_ranks(trainee, weights, part["weights"], fresh)
            part["weights"] = jax.device_put(both, where)
        if "ema" in part:
            part["ema"] = jax.tree.map(jnp.copy, part["weights"])
    return state


def _with_fresh_ranks(adapter: ResolvedAdapter, read: Tree, loaded: Tree, fresh: Tree) -> Tree:
    """The `loaded` factors with fresh ones, which change no product, in the ranks that no layer of
    what was `read` has: two factors of zeros would stay zeros. `read` is on the host."""
    leaves, others = dict(walk(loaded)), dict(walk(fresh))
    for module in adapter.modules:
        axes = {f"{module.path}.a": -1, f"{module.path}.b": len(module.param.batch)}
        by_rank = [np.moveaxis(at(read, name), axis, 0) for name, axis in axes.items()]
        used = np.any([np.any(a.reshape(module.rank, -1), axis=1) for a in by_rank], axis=0)
        for name, axis in axes.items():
            mask = np.moveaxis(np.expand_dims(used, tuple(range(1, leaves[name].ndim))), 0, axis)
            leaves[name] = jnp.where(mask, leaves[name], others[name])
    return nest(leaves.items())


def _read_adapter(model: HfModel, adapter: ResolvedAdapter, base: Frozen) -> Tree:
    """The factors of a PEFT folder, which must have been trained on this base."""

    def hashes() -> Iterator[str]:
        yield base.hash
        if base.read is not None:
            yield weights_hash(base.read(), ml_dtypes.bfloat16)

    folder = Path(adapter.init_from)
    weights = read_adapter(folder, model, adapter, base.read)  # as much trained whole as here
    refuse_other_base(folder, base.path or base.hash, hashes(), "set train.init_from to that one")
    return weights
