"""Adapters out of a checkpoint: to go on training, or merged into their base.

A run may have gained adapters since the checkpoint (they start fresh) or lost some (they are
left out); the base must be the one they were trained on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.checkpoint.saved import SavedStates
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.program.lora import DEFAULT, ResolvedAdapter, merged, resolved
from lmwright.program.lora_state import Base, abstract_state, init_state, load_base, saved
from lmwright.program.plan import Plan

BY_ADAPTER = ("weights", "optimizer", "ema")


def restore(
    plan: Plan, checkpoints: SavedStates, base: Base, step: int | None = None
) -> tuple[Tree, dict[str, Any]]:
    """The state around the base and the meta of the newest checkpoint, or of that of a step;
    for a fresh state the meta is empty.

    Raises UserError where the base is not the one that the adapters were trained on.
    """
    wanted = saved(abstract_state(plan))
    abstract = lambda shapes: _in_checkpoint(plan, shapes, wanted)  # noqa: E731
    if step is None:
        found = checkpoints.restore(abstract)
    else:
        found = checkpoints.restore_at(step, abstract)
    if found is None:
        return init_state(plan, base), {}
    state, meta = found
    if meta["base"]["hash"] != base.hash:
        raise UserError(
            f"train.init_from: {base.path or base.hash} is not the base that the adapters in "
            f"{plan.run.dir} were trained on ({meta['base']['path'] or meta['base']['hash']}); "
            f"point to that one"
        )
    names = {one.name for one in resolved(plan.run)}
    if not names <= state["weights"].keys():
        fresh = init_state(plan, base)
    for kind in BY_ADAPTER:
        if kind in wanted:
            state[kind] = {
                name: state[kind][name] if name in state[kind] else fresh[kind][name]
                for name in names
            }
    return state | {"base": base.weights}, meta


def _in_checkpoint(plan: Plan, shapes: Any, wanted: Tree) -> Tree:
    """What to read: of adapters in both as the run wants it, of others as it was saved."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    as_saved = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)  # noqa: E731
    found = dict(shapes)
    abstract = {name: tree for name, tree in wanted.items() if name not in BY_ADAPTER}
    for kind in BY_ADAPTER:
        if kind not in found:
            continue
        ours = wanted.get(kind, {})
        abstract[kind] = {
            name: ours[name] if name in ours else jax.tree.map(as_saved, _plain(tree))
            for name, tree in found[kind].items()
        }
    return abstract


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _plain(inner) for name, inner in tree.items()}
    return tree


def counts_of(state: Tree) -> dict[str, int]:
    """Steps that each adapter has trained."""
    return {name: int(opt["count"]) for name, opt in state["optimizer"].items()}


def trained(plan: Plan, folder: Path, step: int | None = None) -> tuple[Base, Tree]:
    """The base, and each adapter's weights (the moving average where there is one), newest or
    of a step. Raises UserError where there is no checkpoint."""
    base = load_base(plan)
    state, meta = restore(plan, SavedStates(folder), base, step)
    if not meta:
        raise UserError(f"{folder}: has no checkpoint yet; train at least one step")
    return base, state.get("ema", state["weights"])


def pick(plan: Plan, name: str | None) -> ResolvedAdapter:
    """The adapter of a name, or the only one. Raises UserError where that is not clear."""
    adapters = {one.name: one for one in resolved(plan.run)}
    if name is None and len(adapters) == 1:
        return next(iter(adapters.values()))
    if name not in adapters:
        listed = ", ".join(adapters)
        what = f"no adapter is called {name!r}" if name else "it has several adapters"
        raise UserError(f"{plan.run.dir}: {what}; choose with --adapter: {listed or DEFAULT}")
    return adapters[name]


def merged_weights(
    plan: Plan, folder: Path, name: str | None = None, step: int | None = None
) -> Tree:
    """float32 weights of the model with one adapter in them."""
    adapter = pick(plan, name)
    base, weights = trained(plan, folder, step)
    with jax.set_mesh(plan.mesh):
        return jax.jit(lambda b, w: merged(adapter, b, w))(base.weights, weights[adapter.name])
