"""State: everything that a step reads and writes, and what a checkpoint holds.

    {"step": int32, "weights": tree, "optimizer": tree, "ema": tree or absent}

`abstract_state` serves init, checkpoint restore and ahead-of-time compilation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from podsmith.core.param import Tree, init_weights
from podsmith.optim.build import build_optimizer
from podsmith.plan.resolve import Plan


def optimizer_of(plan: Plan) -> optax.GradientTransformation:
    """The run's optimizer, built from the arrows of the plan's spec."""
    return build_optimizer(plan.run.optim, plan.spec, plan.run.train.steps)


def fresh_state(plan: Plan) -> Tree:
    """Traceable: the state before the first step."""
    weights = init_weights(plan.spec, jax.random.key(plan.run.seed))
    state = {
        "step": jnp.zeros((), jnp.int32),
        "weights": weights,
        "optimizer": optimizer_of(plan).init(weights),
    }
    if plan.run.train.ema_decay is not None:
        state["ema"] = weights
    return state


def abstract_state(plan: Plan) -> Tree:
    """The state as ShapeDtypeStructs with shardings; no memory is taken."""
    shapes = jax.eval_shape(lambda: fresh_state(plan))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(plan, shapes),
    )


def state_shardings(plan: Plan, shapes: Tree) -> Tree:
    """Shardings of a state: optimizer leaves follow the weight whose path they end in, in
    every dimension that has the weight's size (scales and factors have fewer)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(plan.shardings)
    sizes = dict(jax.tree_util.tree_flatten_with_path(shapes["weights"])[0])
    by_path = {tuple(map(str, path)): (sizes[path].shape, s.spec) for path, s in flat}

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = tuple(map(str, path))
        for start in range(len(names)):
            if names[start:] in by_path:
                shape, spec = by_path[names[start:]]
                return NamedSharding(plan.mesh, _fit(leaf.shape, shape, spec))
        return NamedSharding(plan.mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(one, shapes)


def _fit(shape: tuple[int, ...], like: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    entries = list(spec) + [None] * (len(like) - len(spec))
    kept = [
        entry if i < len(like) and size == like[i] else None
        for i, (size, entry) in enumerate(zip(shape, entries + [None] * len(shape), strict=False))
    ]
    return PartitionSpec(*kept)


def init_state(plan: Plan) -> Tree:
    """A fresh state, created in place on the plan's devices."""
    shardings = state_shardings(plan, jax.eval_shape(lambda: fresh_state(plan)))
    with jax.set_mesh(plan.mesh):
        return jax.jit(lambda: fresh_state(plan), out_shardings=shardings)()


def eval_weights(state: Tree) -> Tree:
    """What evaluation, generation and export use: the moving average where there is one."""
    return state.get("ema", state["weights"])
