"""State: everything that a step reads and writes.

    {"step": int32, "frozen": tree,
     "trained": {name: {"weights": tree, "optimizer": tree, "ema": tree or absent,
                        "skipped": {"total": int32, "in_a_row": int32},
                        "recent": {"loss": [128], "grad_norm": [128]} or absent}}}

A checkpoint holds all of it but `frozen`, which is made again from where it came. The count in an
optimizer is the number of its updates; with the steps that were skipped it is that of the
trainee's own steps, which batch, schedule and random parts follow. `recent` belongs to
`train.skip_spikes`: values of the last updates, the one of update k at k mod 128. `abstract_state`
serves init, checkpoint restore and ahead-of-time compilation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.core.compute import HOST_MEMORY
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.core.sharding import batch_sharding, lenient_shardings
from lmwright.optim.build import build_optimizer, on_host, state_spec
from lmwright.program.plan import Plan
from lmwright.program.trainee import Frozen, Trainee

RECENT = 128  # updates that a spike is measured by


def optimizer_of(trainee: Trainee) -> optax.GradientTransformationExtraArgs:
    """A trainee's optimizer, built from the arrows of its spec."""
    return build_optimizer(trainee.optim, trainee.spec, trainee.steps)


def fresh_part(plan: Plan, trainee: Trainee, weights: Tree) -> Tree:
    """Traceable: a trainee's part of the state before its first step."""
    part = {
        "weights": weights,
        "optimizer": optimizer_of(trainee).init(weights),
        "skipped": {"total": jnp.zeros((), jnp.int32), "in_a_row": jnp.zeros((), jnp.int32)},
    }
    if plan.run.train.skip_spikes != "none":
        part["recent"] = {name: jnp.zeros(RECENT) for name in ("loss", "grad_norm")}
    return part if plan.run.train.ema_decay is None else {**part, "ema": weights}


def fresh_state(plan: Plan, frozen: Tree) -> Tree:
    """Traceable: what a checkpoint holds of the state before the first step."""
    key, training = jax.random.key(plan.run.seed), plan.training
    return {
        "step": jnp.zeros((), jnp.int32),
        "trained": {
            trainee.name: fresh_part(plan, trainee, training.init(trainee, frozen, key))
            for trainee in training.trainees
        },
    }


def abstract_state(plan: Plan) -> Tree:
    """The state as ShapeDtypeStructs with shardings; no memory is taken."""
    frozen = plan.training.abstract_frozen(plan.mesh)
    shapes = jax.eval_shape(lambda base: fresh_state(plan, base), frozen)
    return {
        **jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            saved_shardings(plan),
        ),
        "frozen": frozen,
    }


def abstract_batch(plan: Plan, num_rows: int | None = None) -> Batch:
    """The batch of one step, [A, B, T], as ShapeDtypeStructs with shardings; B is `num_rows`
    where not all trainees of a run still train."""
    train = plan.run.train
    rows = num_rows or train.global_batch_size // train.num_microbatches
    shape = (train.num_microbatches, rows, plan.seq_len)
    sharding = batch_sharding(plan.mesh, leading=1)
    dtypes: Any = Batch(jnp.int32, jnp.int32, jnp.int32, jnp.float32)  # type: ignore[arg-type]
    return jax.tree.map(lambda d: jax.ShapeDtypeStruct(shape, d, sharding=sharding), dtypes)


def saved_shardings(plan: Plan) -> Tree:
    """Shardings of what a checkpoint holds: the optimizer's arrays follow the axes of their
    weights; a dimension that does not divide (a few block scales, say) stays whole."""
    return {
        "step": NamedSharding(plan.mesh, PartitionSpec()),
        "trained": {
            trainee.name: part_shardings(plan, trainee) for trainee in plan.training.trainees
        },
    }


def part_shardings(plan: Plan, trainee: Trainee) -> Tree:
    """Shardings of a trainee's part of the state."""
    weights = plan.training.shardings(trainee, plan.mesh)
    optimizer = lenient_shardings(state_spec(trainee.optim, trainee.spec), plan.mesh)
    optimizer = jax.tree.map(
        lambda sharding, far: sharding.with_memory_kind(HOST_MEMORY) if far else sharding,
        optimizer, on_host(trainee.optim, trainee.spec),
    )  # fmt: skip
    whole = NamedSharding(plan.mesh, PartitionSpec())
    skipped = {"total": whole, "in_a_row": whole}
    part = {"weights": weights, "optimizer": optimizer, "skipped": skipped}
    if plan.run.train.skip_spikes != "none":
        part["recent"] = {"loss": whole, "grad_norm": whole}
    return part if plan.run.train.ema_decay is None else {**part, "ema": weights}


def saved(state: Tree) -> Tree:
    """The part of a state that a checkpoint holds."""
    return {name: tree for name, tree in state.items() if name != "frozen"}


def fresh_frozen(plan: Plan) -> Frozen:
    """Frozen weights made from the run's seed."""
    shapes = plan.training.abstract_frozen(plan.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    with jax.set_mesh(plan.mesh):
        key = jax.random.key(plan.run.seed)
        make = jax.jit(lambda: plan.training.make_frozen(key), out_shardings=shardings)
        return Frozen(make(), "", f"seed {plan.run.seed}")


def init_state(plan: Plan, frozen: Frozen | None = None) -> Tree:
    """A fresh state, created in place on the plan's devices, around frozen weights (randomly
    initialized if unset)."""
    frozen = fresh_frozen(plan) if frozen is None else frozen
    with jax.set_mesh(plan.mesh):
        make = jax.jit(lambda w: fresh_state(plan, w), out_shardings=saved_shardings(plan))
        return make(frozen.weights) | {"frozen": frozen.weights}


def averaged_weights(part: Tree) -> Tree:
    """A trainee's weights for evaluation and export: the moving average where there is one."""
    return part.get("ema", part["weights"])


def own_step(part: Tree) -> jax.Array:
    """Steps that a trainee has done: its updates and the steps that were skipped."""
    return part["optimizer"]["count"] + part["skipped"]["total"]


def counts_of(state: Tree) -> dict[str, int]:
    """Steps that each trainee has done."""
    return {name: int(own_step(part)) for name, part in state["trained"].items()}
