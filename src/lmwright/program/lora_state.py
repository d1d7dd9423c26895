"""State of a run that trains adapters: the base is in it, and never in a checkpoint.

    {"step": int32, "base": typed leaves, "weights": {adapter: tree}, "optimizer": {adapter: ...},
     "ema": {adapter: tree} or absent}

The base is made again from where it came; a checkpoint holds its hash. The count in an adapter's
optimizer is the number of its own steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.core.param import Tree, init_weights, nest, walk
from lmwright.core.sharding import lenient_shardings, weight_shardings
from lmwright.optim.build import build_optimizer, state_spec
from lmwright.program.lora import (
    ResolvedAdapter,
    base_spec,
    bind,
    init_adapter,
    resolved,
    scaled,
    storages,
    stored,
)
from lmwright.program.plan import Plan

SMALL = {"int8": jnp.int8, "int4": jnp.int4}


@dataclass(frozen=True)
class Base:
    """The frozen weights on the devices, and what tells them from others."""

    weights: Tree
    path: str
    """Where they came from; empty for weights made from the run's seed."""
    hash: str
    read: Callable[[], Tree] | None = None
    """Reads them again as they lie there, in float32 on the host; None for a run's own."""


def optimizer_of(adapter: ResolvedAdapter) -> optax.GradientTransformation:
    """An adapter's own optimizer."""
    return build_optimizer(adapter.optim, adapter.spec, adapter.steps)


def fresh(plan: Plan, base: Tree) -> Tree:
    """Traceable: everything but the base, before the first step."""
    key = jax.random.key(plan.run.seed)
    adapters = resolved(plan.run)
    weights = {one.name: init_adapter(one, base, key) for one in adapters}
    state = {
        "step": jnp.zeros((), jnp.int32),
        "weights": weights,
        "optimizer": {one.name: optimizer_of(one).init(weights[one.name]) for one in adapters},
    }
    if plan.run.train.ema_decay is not None:
        state["ema"] = weights
    return state


def abstract_base(plan: Plan) -> Tree:
    """The base as ShapeDtypeStructs, with its shardings."""

    def one(path: str, leaf: Any, storage: str) -> Any:
        if storage in ("fp32", "bf16"):
            return _struct(leaf, jnp.float32 if storage == "fp32" else jnp.bfloat16)
        scale = jnp.float32 if storage == "int8" else jnp.bfloat16
        sides = {"inputs": leaf.inputs, "outputs": leaf.outputs}
        values = _struct(leaf.values, SMALL[storage])
        return type(leaf)(values, _struct(leaf.scale, scale), **sides)

    kinds = storages(plan.run)
    spec = base_spec(plan.run)
    shapes = nest((path, one(path, leaf, kinds[path])) for path, leaf in walk(spec))
    return _with_shardings(shapes, base_shardings(plan))


def _struct(param: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(param.shape, dtype)


def _with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings
    )


def base_shardings(plan: Plan) -> Tree:
    """Shardings of the base: integers as their weights; a few scales may stay whole."""
    weight_shardings(plan.spec, plan.mesh)  # refuses what does not divide, by its own name
    return lenient_shardings(base_spec(plan.run), plan.mesh)


def state_shardings(plan: Plan) -> Tree:
    """Shardings of a state, the base included."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    adapters = resolved(plan.run)
    weights = {one.name: lenient_shardings(one.spec, plan.mesh) for one in adapters}
    shardings = {
        "step": whole,
        "base": base_shardings(plan),
        "weights": weights,
        "optimizer": {
            one.name: lenient_shardings(state_spec(one.optim, one.spec), plan.mesh)
            for one in adapters
        },
    }
    if plan.run.train.ema_decay is not None:
        shardings["ema"] = weights
    return shardings


def abstract_state(plan: Plan) -> Tree:
    """The state as ShapeDtypeStructs with shardings; no memory is taken."""
    base = abstract_base(plan)
    shapes = jax.eval_shape(lambda base: fresh(plan, base), base) | {"base": base}
    return _with_shardings(shapes, state_shardings(plan))


def saved(state: Tree) -> Tree:
    """The part of a state that a checkpoint holds."""
    return {name: tree for name, tree in state.items() if name != "base"}


def fresh_base(plan: Plan) -> Base:
    """Frozen weights made from the run's seed, as the run keeps them."""
    with jax.set_mesh(plan.mesh):
        make = jax.jit(
            lambda: stored(plan.run, init_weights(plan.spec, jax.random.key(plan.run.seed))),
            out_shardings=base_shardings(plan),
        )
        return Base(make(), "", f"seed {plan.run.seed}")


def init_state(plan: Plan, base: Base) -> Tree:
    """A fresh state around the base."""
    shardings = saved(state_shardings(plan))
    with jax.set_mesh(plan.mesh):
        state = jax.jit(lambda w: fresh(plan, w), out_shardings=shardings)(base.weights)
    return state | {"base": base.weights}


def bound(plan: Plan, state: Tree, name: str) -> Tree:
    """The model with one adapter, as evaluation and generation read it; traceable."""
    adapter = next(one for one in resolved(plan.run) if one.name == name)
    weights = state.get("ema", state["weights"])[name]
    params = {module.path: module.param for module in adapter.modules}
    return bind(params, state["base"], scaled(adapter, weights))
