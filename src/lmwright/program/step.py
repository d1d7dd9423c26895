"""The train step: the only jit of training.

batch [A, B, T] --scan over A--> sum of gradients, sum of weights
                                 --> mean --> clip --> optimizer --> weights
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lmwright.core.batch import Batch
from lmwright.core.param import Tree
from lmwright.core.pipeline import interleaved, num_stages
from lmwright.core.sharding import batch_sharding
from lmwright.objectives.base import Loss
from lmwright.optim.build import clip, gradient_norm, make_schedule
from lmwright.program.plan import Plan, step_options
from lmwright.program.state import abstract_state, optimizer_of

Step = Callable[[Tree, Batch], tuple[Tree, dict[str, Array]]]


def make_step(plan: Plan) -> Step:
    """The jitted step `(state, batch) -> (state, metrics)`; the state is donated.

    Leaves of the batch are [A, B, T] with A microbatches; metrics are float32 scalars.
    """
    if plan.run.lora is not None:
        from lmwright.program import lora_step
        from lmwright.program.lora import resolved

        return lora_step.make_step(plan, resolved(plan.run))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan))
    batch = batch_sharding(plan.mesh, leading=1)
    return jax.jit(
        partial(train_step, plan),
        donate_argnums=0,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, None),
        compiler_options=step_options(plan) or None,
    )


def train_step(plan: Plan, state: Tree, batch: Batch) -> tuple[Tree, dict[str, Array]]:
    """One optimizer step; traceable."""
    run = plan.run
    weights = state["weights"]
    key = jax.random.fold_in(jax.random.key(run.seed), state["step"])
    grads, loss = summed_gradients(plan, weights, batch, key)
    weight = jnp.maximum(loss.weight, 1.0)
    # the norm is that of the sums, and means are a product, not a quotient: this way a CPU
    # takes them while the optimizer reads the sums, and never stores them
    share = 1 / weight
    norm = gradient_norm(grads, plan.spec) * share
    grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    grads = clip(grads, norm, run.optim.clip_norm)
    updates, opt = optimizer_of(plan).update(grads, state["optimizer"], weights)
    new = {
        "step": state["step"] + 1,
        "weights": optax.apply_updates(weights, updates),
        "optimizer": opt,
    }
    if "ema" in state:
        decay = run.train.ema_decay
        new["ema"] = jax.tree.map(
            lambda old, fresh: decay * old + (1 - decay) * fresh, state["ema"], new["weights"]
        )
    metrics = {
        "loss": loss.total / weight,
        "grad_norm": norm,
        "learning_rate": make_schedule(run.optim, run.train.steps)(state["step"]),
        "target_tokens": loss.weight,
        **{name: total / jnp.maximum(n, 1.0) for name, (total, n) in loss.metrics.items()},
    }
    return new, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def summed_gradients(plan: Plan, weights: Tree, batch: Batch, key: Array) -> tuple[Tree, Loss]:
    """Gradient of the summed loss and the sums themselves, over all A microbatches: one after
    the other, or following each other through the stages of a pipeline."""
    objective, model, how = plan.run.objective, plan.run.model, plan.how

    def one(rows: Batch, index: Array | int) -> tuple[Tree, Loss]:
        def total(w: Tree) -> tuple[Array, Loss]:
            loss = objective.loss(model, w, rows, jax.random.fold_in(key, index), how)
            return loss.total, loss

        (_, loss), grads = jax.value_and_grad(total, has_aux=True)(weights)
        return grads, loss

    num = batch.tokens.shape[0]
    if num == 1 or num_stages() > 1:  # a pipeline takes all of them at once
        return one(jax.tree.map(interleaved, batch), 0)

    def body(sums: tuple[Tree, Loss], piece: tuple[Batch, Array]):
        return jax.tree.map(jnp.add, sums, one(*piece)), None

    first = jax.tree.map(lambda a: a[0], batch)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(one, first, 0)
    )
    return jax.lax.scan(body, zeros, (batch, jnp.arange(num)))[0]
