"""Adapters out of a checkpoint: to go on training, or merged into their base.

A run may have gained adapters since the checkpoint (they start fresh) or lost some (they are
left out); the base must be the one they were trained on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.checkpoint.saved import SavedStates
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.formats.adapter_note import refuse_other_base
from lmwright.formats.peft import read_adapter
from lmwright.formats.tensor_hash import weights_hash
from lmwright.program import lora_state
from lmwright.program.lora import DEFAULT, ResolvedAdapter, resolved
from lmwright.program.lora_state import Base, abstract_state, saved, state_shardings
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
    """Shapes to read: adapters of both the run and the checkpoint as the run wants them, others as
    they were saved."""
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


def init_state(plan: Plan, base: Base) -> Tree:
    """A fresh state around the base; adapters that start from PEFT folders have read them."""
    state = lora_state.init_state(plan, base)
    shardings = saved(state_shardings(plan))
    for adapter in resolved(plan.run):
        if adapter.init_from is None:
            continue
        try:
            weights = _read_adapter(plan.run.model, adapter, base)
        except UserError as error:
            of = f".adapters[{adapter.name!r}]" if plan.run.lora.adapters else ""
            raise UserError(f"lora{of}.init_from: {error}") from error
        weights = jax.device_put(weights, shardings["weights"][adapter.name])
        state["weights"][adapter.name] = weights
        if "ema" in state:
            state["ema"][adapter.name] = jax.tree.map(jnp.copy, weights)
    return state


def _read_adapter(model: Any, adapter: ResolvedAdapter, base: Base) -> Tree:
    """The factors of a PEFT folder, which must have been trained on this base."""

    def hashes() -> Iterator[str]:
        yield base.hash
        if base.read is not None:
            yield weights_hash(base.read(), ml_dtypes.bfloat16)

    folder = Path(adapter.init_from)
    refuse_other_base(folder, base.path or base.hash, hashes(), "set train.init_from to that one")
    return read_adapter(folder, model, adapter, base.read)
