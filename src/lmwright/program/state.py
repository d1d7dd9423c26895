"""State: everything that a step reads and writes, and what a checkpoint holds.

    {"step": int32, "weights": tree, "optimizer": tree, "ema": tree or absent}

`abstract_state` serves init, checkpoint restore and ahead-of-time compilation.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.core.batch import Batch
from lmwright.core.param import Tree, init_weights
from lmwright.core.sharding import batch_sharding, lenient_shardings
from lmwright.optim.build import build_optimizer, state_spec
from lmwright.program import lora_state
from lmwright.program.plan import Plan


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
    if plan.run.lora is not None:
        return lora_state.abstract_state(plan)
    shapes = jax.eval_shape(lambda: fresh_state(plan))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(plan),
    )


def abstract_batch(plan: Plan, num_rows: int | None = None) -> Batch:
    """The batch of one step, [A, B, T], as ShapeDtypeStructs with shardings; B is `num_rows`
    where not all adapters of a run still train."""
    train = plan.run.train
    rows = num_rows or train.global_batch_size // train.num_microbatches
    shape = (train.num_microbatches, rows, plan.seq_len)
    sharding = batch_sharding(plan.mesh, leading=1)
    leaf = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    return Batch(
        tokens=leaf(jnp.int32),
        segment_ids=leaf(jnp.int32),
        positions=leaf(jnp.int32),
        loss_weight=leaf(jnp.float32),
    )


def state_shardings(plan: Plan) -> Tree:
    """Shardings of a state: the optimizer's arrays follow the axes of their weights; a
    dimension that does not divide (a few block scales, say) stays whole."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    shardings = {
        "step": whole,
        "weights": plan.shardings,
        "optimizer": lenient_shardings(state_spec(plan.run.optim, plan.spec), plan.mesh),
    }
    if plan.run.train.ema_decay is not None:
        shardings["ema"] = plan.shardings
    return shardings


def init_state(plan: Plan) -> Tree:
    """A fresh state made by chance, created in place on the plan's devices."""
    if plan.run.lora is not None:
        return lora_state.init_state(plan, lora_state.fresh_base(plan))
    with jax.set_mesh(plan.mesh):
        return jax.jit(lambda: fresh_state(plan), out_shardings=state_shardings(plan))()


def eval_weights(state: Tree) -> Tree:
    """What evaluation, generation and export use: the moving average where there is one."""
    return state.get("ema", state["weights"])
