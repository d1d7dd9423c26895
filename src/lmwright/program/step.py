"""The train step: the only jit of training.

batch [A, B, T] --scan over A--> sums of gradients and losses of each trainee
each trainee:    its own mean --> clip --> optimizer --> weights
                 not finite, or a spike --> the same weights and optimizer, one more skipped step

Several trainees share one pass through what is frozen, which has no lane axis, so that its
matmuls see all rows at once.

    rows of the batch   a b c a b c a b c ...    row i belongs to lane i mod J
    lanes               a  b  c                  each lane has one trainee and equally many rows

A trainee with more rows than others has several lanes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lmwright.core.contract import Batch, Loss
from lmwright.core.leaves import ADAPTER_AXIS
from lmwright.core.param import Tree
from lmwright.core.pipeline import interleaved, num_stages
from lmwright.core.sharding import batch_sharding, batch_ways
from lmwright.kernels import select
from lmwright.optim.build import clip, clip_parts, gradient_norm, make_schedule, on_host
from lmwright.program.plan import Plan, refuse_batch, step_options
from lmwright.program.state import RECENT, abstract_state, optimizer_of, own_step
from lmwright.program.trainee import Trainee

SPIKE = 8.0  # standard deviations of values that are spread normally
LEAST_SPREAD = {"loss": 0.01, "grad_norm": 0.5}  # of the median; norms have long tails

IN_A_ROW = "skipped_in_a_row"
"""Metric: the steps without an update up to this one."""


@dataclass(frozen=True)
class Lanes:
    """Lanes of a microbatch: row i belongs to `trainees[i % len(trainees)]`."""

    trainees: tuple[int, ...]
    """Index of the trainee of each lane."""
    rows: int
    """Rows of each lane in a microbatch."""

    @classmethod
    def of(cls, plan: Plan, active: Sequence[Trainee]) -> "Lanes":
        """Lanes of the trainees that train. Raises UserError where rows do not divide."""
        num, ways = plan.run.train.num_microbatches, batch_ways(plan.mesh)
        plan.training.refuse(plan.mesh, active)
        for trainee in active:
            refuse_batch(plan, trainee.rows, "lora.adapters.rows", f"rows of {trainee.name!r}")
        if len(active) == 1:
            return cls((0,), active[0].rows // num)
        rows = math.gcd(*(trainee.rows // num // ways for trainee in active)) * ways
        lanes = [i for i, trainee in enumerate(active) for _ in range(trainee.rows // num // rows)]
        return cls(tuple(lanes), rows)

    def losses(
        self, loss: Callable[..., Loss], stacked: Any, rows: Batch, each: Sequence[Sequence[Any]],
    ) -> tuple[Loss, ...]:  # fmt: skip
        """The loss of each trainee, all lanes at once: `loss` takes one lane's parts, rows
        [B, T], and what `each` has of its trainee. `stacked` has a leading lane axis."""
        num, of = len(self.trainees), jnp.array(self.trainees)
        count = max(self.trainees) + 1
        cut = jax.tree.map(lambda a: a.reshape(-1, num, *a.shape[1:]).swapaxes(0, 1), rows)
        losses = jax.vmap(loss, axis_name=ADAPTER_AXIS)(
            stacked, cut, *(jnp.stack(own)[of] for own in each)
        )
        sums = jax.tree.map(lambda a: jax.ops.segment_sum(a, of, num_segments=count), losses)
        return tuple(jax.tree.map(lambda a, i=i: a[i], sums) for i in range(count))


def make_step(plan: Plan, active: Sequence[Trainee] | None = None) -> jax.stages.Wrapped:
    """The jitted step `(state, batch) -> (state, metrics)` for the trainees that still train, all
    if unset; the state, which holds them all, is donated.

    Leaves of the batch are [A, B, T] with A microbatches, the rows of those trainees alone;
    metrics are float32 scalars.
    """
    active = tuple(plan.training.trainees if active is None else active)
    Lanes.of(plan, active)  # refuses rows that do not divide
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan))
    batch = batch_sharding(plan.mesh, leading=1)
    return jax.jit(
        partial(train_step, plan, active),
        donate_argnums=0,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, None),
        compiler_options=step_options(plan) or None,
    )


def train_step(
    plan: Plan, active: tuple[Trainee, ...], state: Tree, batch: Batch
) -> tuple[Tree, dict[str, Array]]:
    """One optimizer step of each active trainee; traceable."""
    parts = {trainee.name: state["trained"][trainee.name] for trainee in active}
    key = jax.random.key(plan.run.seed)
    keys = [jax.random.fold_in(key, own_step(part)) for part in parts.values()]
    progress = [own_step(parts[trainee.name]) / trainee.steps for trainee in active]
    weights = {name: part["weights"] for name, part in parts.items()}
    grads, losses = summed_gradients(plan, active, state["frozen"], weights, batch, keys, progress)
    trained, metrics = dict(state["trained"]), []
    for trainee, loss in zip(active, losses, strict=True):
        trained[trainee.name], values = _updated(
            plan, trainee, parts[trainee.name], grads[trainee.name], loss
        )
        metrics.append(values)
    new = {"step": state["step"] + 1, "frozen": state["frozen"], "trained": trained}
    values = _together(active, metrics) if len(plan.training.trainees) > 1 else metrics[0]
    return new, {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _updated(
    plan: Plan, trainee: Trainee, part: Tree, grads: Tree, loss: Loss
) -> tuple[Tree, dict[str, Array]]:
    """A trainee's part of the state after an update by summed gradients, and its metrics. A loss
    or gradient norm that is not finite leaves it as it is, but for the count of such steps."""
    optim, weights, step = trainee.optim, part["weights"], own_step(part)
    weight = jnp.maximum(loss.weight, 1.0)
    # the norm is that of the sums, and means are a product, not a quotient, so that XLA on CPUs
    # fuses the scaling into the optimizer and never stores means
    share = 1 / weight
    norm = gradient_norm(grads, trainee.spec) * share
    grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    if optim.clip_over == "part":
        grads = clip_parts(grads, trainee.spec, optim.clip_norm)
    else:
        grads = clip(grads, norm, optim.clip_norm)
    mean, skipped = loss.total / weight, part["skipped"]
    sound = jnp.isfinite(mean) & jnp.isfinite(norm)
    measured = {"loss": mean, "grad_norm": norm}
    if "recent" in part:
        sound &= ~spike(part["recent"], measured)
    updates, optimizer = optimizer_of(trainee).update(
        grads, part["optimizer"], weights, schedule_step=step, sound=sound
    )
    optimizer = jax.tree.map(  # those on the host have chosen already
        lambda far, fresh, old: fresh if far else jnp.where(sound, fresh, old),
        on_host(optim, trainee.spec), optimizer, part["optimizer"],
    )  # fmt: skip
    updates = plan.training.scale_updates(updates)
    new = {"weights": optax.apply_updates(weights, updates)}
    decay = plan.run.train.ema_decay
    if decay is not None:  # decay and 1 - decay, as float32, do not add up to 1
        new["ema"] = jax.tree.map(
            lambda old, fresh: old + (1 - decay) * (fresh - old), part["ema"], new["weights"]
        )
    if "recent" in part:
        place = part["optimizer"]["count"] % RECENT
        new["recent"] = {k: part["recent"][k].at[place].set(v) for k, v in measured.items()}
    new = jax.tree.map(partial(jnp.where, sound), new, {name: part[name] for name in new})
    new["optimizer"] = optimizer
    new["skipped"] = {
        "total": skipped["total"] + jnp.where(sound, 0, 1),
        "in_a_row": jnp.where(sound, 0, skipped["in_a_row"] + 1),
    }
    metrics = {
        "loss": mean,
        "grad_norm": norm,
        "learning_rate": make_schedule(optim, trainee.steps)(step),
        "target_tokens": loss.weight,
        "skipped": new["skipped"]["total"],
        IN_A_ROW: new["skipped"]["in_a_row"],
        **{name: total / jnp.maximum(n, 1.0) for name, (total, n) in loss.metrics.items()},
    }
    return new, metrics


def spike(recent: Tree, measured: Mapping[str, Array]) -> Array:
    """True where a value is beyond the median of the last updates by many times their spread, which
    is the median distance from it. Too few updates show none."""
    made = recent["grad_norm"] > 0  # zero where there was no update yet
    middle = (jnp.sum(made) - 1) // 2
    spikes = []
    for name, value in measured.items():
        median = jnp.sort(jnp.where(made, recent[name], jnp.inf))[middle]
        distances = jnp.where(made, jnp.abs(recent[name] - median), jnp.inf)
        spread = jnp.maximum(
            1.4826 * jnp.sort(distances)[middle], LEAST_SPREAD[name] * jnp.abs(median)
        )
        spikes.append(value > median + SPIKE * spread)
    return reduce(jnp.logical_or, spikes) & (jnp.sum(made) >= RECENT // 2)


def _together(active: Sequence[Trainee], metrics: list[dict[str, Array]]) -> dict[str, Array]:
    """Metrics of all trainees over all their tokens, and those of each by its name."""
    tokens = [values["target_tokens"] for values in metrics]
    all_tokens = reduce(jnp.add, tokens)
    total = jnp.maximum(all_tokens, 1.0)
    means = {
        name: sum(values[name] * n for values, n in zip(metrics, tokens, strict=True)) / total
        for name in metrics[0]
    }
    by_trainee = {
        f"{name}/{trainee.name}": value
        for trainee, values in zip(active, metrics, strict=True)
        for name, value in values.items()
    }
    skipped = {
        "skipped": reduce(jnp.add, [values["skipped"] for values in metrics]),
        IN_A_ROW: reduce(jnp.maximum, [values[IN_A_ROW] for values in metrics]),
    }
    return means | skipped | {"target_tokens": all_tokens} | by_trainee


def summed_gradients(
    plan: Plan, active: tuple[Trainee, ...], frozen: Tree, weights: Mapping[str, Tree],
    batch: Batch, keys: Sequence[Array], progress: Sequence[Array] = (),
) -> tuple[Tree, tuple[Loss, ...]]:  # fmt: skip
    """Gradient of each trainee's summed loss, by name, and the sums, over all A microbatches: one
    after the other, or following each other through the stages of a pipeline. `keys` has one for
    each trainee, and `progress` how much of its steps is done: nothing if unset."""
    objective, model, training = plan.run.objective, plan.run.model, plan.training
    compute = select.for_lanes(plan.compute, batch.tokens.shape[1], model.embed_dim)
    lanes, rates = Lanes.of(plan, active), [jnp.float32(trainee.dropout) for trainee in active]
    drops = any(trainee.dropout for trainee in active)
    progress = progress or [jnp.zeros(())] * len(active)
    num = batch.tokens.shape[0]
    at_once = num == 1 or num_stages() > 1  # a pipeline takes all microbatches together
    whole = objective.whole_batch and not at_once

    def loss_of(parts: Any, rows: Batch, key: Array, rate: Any, done: Any, index: Any) -> Loss:
        pieces = jnp.arange(num if at_once or whole else 1) + index
        own = jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, n), 1))
        drop = (own(pieces), rate) if drops else ()
        # by their numbers in the batch, so that other microbatches draw the same
        numbers = jnp.arange(len(rows.tokens)) * (stride := 1 if at_once else num) + index
        draws = objective.draws(key, numbers, stride * len(numbers), done)
        return objective.loss(model, training.bind(frozen, parts, *drop), rows, draws, compute)

    def total(
        weights: Mapping[str, Tree], rows: Batch, index: Array | int
    ) -> tuple[Array, tuple[Loss, ...]]:
        parts = [training.parts(trainee, weights[trainee.name]) for trainee in active]
        loss = partial(loss_of, index=index)
        losses: tuple[Loss, ...]
        if len(lanes.trainees) == 1:
            losses = (loss(parts[0], rows, keys[0], rates[0], progress[0]),)
        else:
            stacked = training.stack(parts, lanes.trainees)
            losses = lanes.losses(loss, stacked, rows, (keys, rates, progress))
        return reduce(jnp.add, [loss.total for loss in losses]), losses

    def piece_gradients(rows: Batch, index: Array | int) -> tuple[Tree, tuple[Loss, ...]]:
        (_, losses), grads = jax.value_and_grad(total, has_aux=True)(weights, rows, index)
        return grads, losses

    if at_once or whole:
        return piece_gradients(batch if whole else jax.tree.map(interleaved, batch), 0)

    def body(sums: Any, piece: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, piece_gradients(*piece)), None

    first = jax.tree.map(lambda a: a[0], batch)
    _, losses = jax.eval_shape(total, weights, first, 0)  # a gradient is like its weight
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (weights, losses))
    return jax.lax.scan(body, zeros, (batch, jnp.arange(num)))[0]
