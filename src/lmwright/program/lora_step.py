"""The train step of adapters: one pass through the frozen base for all of them.

    rows of the batch   a b c a b c a b c ...    row i belongs to lane i mod J
    lanes               a  b  c                  each lane has one adapter and equally many rows
    vmap over lanes  -> loss and weight of each lane -> sums of each adapter
    each adapter: its own mean, clipping, optimizer, rate

The base has no lane axis, so its matmuls see all rows at once; only the low-rank factors are
batched by lane. Adapters with different ranks are padded with zeros, whose gradients are zero.
An adapter with more rows than others has several lanes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lmwright.core.batch import Batch
from lmwright.core.param import Param, Tree, walk
from lmwright.core.pipeline import interleaved, num_stages
from lmwright.core.sharding import batch_sharding, batch_ways
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.objectives.base import Loss
from lmwright.optim.build import clip, make_schedule
from lmwright.program.lora import ResolvedAdapter, bind, scaled
from lmwright.program.lora_state import abstract_state, optimizer_of
from lmwright.program.plan import Plan, step_options

Parts = Mapping[str, Mapping[str, Array]]
Step = Callable[[Tree, Batch], tuple[Tree, dict[str, Array]]]


@dataclass(frozen=True)
class Lanes:
    """How the rows of a microbatch belong to adapters: row i to `adapters[i % len(adapters)]`."""

    adapters: tuple[int, ...]
    """Index of the adapter of each lane."""
    rows: int
    """Rows of each lane in a microbatch."""

    @classmethod
    def of(cls, plan: Plan, active: Sequence[ResolvedAdapter]) -> "Lanes":
        """Lanes of the adapters that train. Raises UserError where rows do not divide."""
        num, ways = plan.run.train.num_microbatches, batch_ways(plan.mesh)
        _refuse_experts(plan, active)
        for one in active:
            if one.rows % (num * ways):
                raise UserError(
                    f"lora.adapters.rows: {one.rows} of {one.name!r} do not divide into {num} "
                    f"microbatches over {ways} batch shards; use a multiple of {num * ways}"
                )
        if len(active) == 1:
            return cls((0,), active[0].rows // num)
        if plan.mesh.shape["stage"] > 1:
            raise UserError(
                "mesh.stage: several adapters at once cannot be split into stages; use mesh.fsdp"
            )
        rows = math.gcd(*(one.rows // num // ways for one in active)) * ways
        lanes = [i for i, one in enumerate(active) for _ in range(one.rows // num // rows)]
        return cls(tuple(lanes), rows)


def _refuse_experts(plan: Plan, active: Sequence[ResolvedAdapter]) -> None:
    """Raises UserError for what matrices of experts cannot do yet."""
    experts = [path for path, param in walk(plan.spec) if "experts" in param.axes]
    if experts and len(active) > 1:
        raise UserError(
            "lora.adapters: several at once need a model without experts; train one at a time"
        )
    if plan.mesh.size == 1:
        return
    if any("experts" in module.param.axes for one in active for module in one.modules):
        raise UserError("lora.targets: experts take adapters on one device only; leave them out")
    if experts and plan.run.lora.base in ("int8", "int4"):
        raise UserError(
            f'lora.base: {plan.run.lora.base} with experts is for one device; use "bf16"'
        )


def make_step(plan: Plan, active: Sequence[ResolvedAdapter]) -> Step:
    """The jitted step `(state, batch) -> (state, metrics)` for the adapters that train; the
    state, which holds them all, is donated. The batch has their rows alone."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan))
    lanes = Lanes.of(plan, active)
    return jax.jit(
        partial(lora_step, plan, tuple(active), lanes),
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(plan.mesh, leading=1)),
        out_shardings=(shardings, None),
        compiler_options=step_options(plan) or None,
    )


def lora_step(
    plan: Plan, active: tuple[ResolvedAdapter, ...], lanes: Lanes, state: Tree, batch: Batch
) -> tuple[Tree, dict[str, Array]]:
    """One optimizer step of each active adapter; traceable."""
    trained = {one.name: state["weights"][one.name] for one in active}
    counts = [state["optimizer"][one.name]["count"] for one in active]
    grads, losses = summed_gradients(plan, active, lanes, state["base"], trained, batch, counts)
    new = {name: dict(state[name]) for name in ("weights", "optimizer", "ema") if name in state}
    found = []
    for i, one in enumerate(active):
        loss = jax.tree.map(lambda a, i=i: a[i], losses)
        weight = jnp.maximum(loss.weight, 1.0)
        mean = jax.tree.map(lambda g, weight=weight: g / weight, grads[one.name])
        norm = optax.global_norm(mean)
        mean = clip(mean, norm, one.optim.clip_norm)
        old = state["optimizer"][one.name]
        updates, opt = optimizer_of(one).update(mean, old, trained[one.name])
        updates = faster_b(updates, plan.run.lora.b_rate_ratio)
        weights = optax.apply_updates(trained[one.name], updates)
        new["weights"][one.name], new["optimizer"][one.name] = weights, opt
        if "ema" in new:
            new["ema"][one.name] = _averaged(plan, state["ema"][one.name], weights)
        found.append(_metrics(one, loss, weight, norm, old["count"]))
    metrics = found[0] if len(found) == 1 else _together(active, found)
    return (
        {**new, "base": state["base"], "step": state["step"] + 1},
        {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()},
    )


def _averaged(plan: Plan, old: Tree, new: Tree) -> Tree:
    decay = plan.run.train.ema_decay
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)


def faster_b(updates: Tree, ratio: float) -> Tree:
    """Updates with those of every second factor times `ratio` (LoRA+)."""
    if ratio == 1:
        return updates
    return {
        name: faster_b(tree, ratio)
        if isinstance(tree, Mapping)
        else tree * (ratio if name == "b" else 1)
        for name, tree in updates.items()
    }


def _metrics(
    one: ResolvedAdapter, loss: Loss, weight: Array, norm: Array, count: Array
) -> dict[str, Array]:
    return {
        "loss": loss.total / weight,
        "grad_norm": norm,
        "learning_rate": make_schedule(one.optim, one.steps)(count),
        "target_tokens": loss.weight,
        **{name: total / jnp.maximum(n, 1.0) for name, (total, n) in loss.metrics.items()},
    }


def _together(active: Sequence[ResolvedAdapter], found: list[dict]) -> dict[str, Array]:
    """Metrics of all adapters over all their tokens, and those of each by its name."""
    tokens = [one["target_tokens"] for one in found]
    total = jnp.maximum(sum(tokens), 1.0)
    means = {
        name: sum(one[name] * n for one, n in zip(found, tokens, strict=True)) / total
        for name in found[0]
    }
    own = {
        f"{name}/{adapter.name}": value
        for adapter, values in zip(active, found, strict=True)
        for name, value in values.items()
    }
    return means | {"target_tokens": sum(tokens)} | own


def summed_gradients(
    plan: Plan,
    active: tuple[ResolvedAdapter, ...],
    lanes: Lanes,
    base: Tree,
    trained: Tree,
    batch: Batch,
    counts: Sequence[Array],
) -> tuple[Tree, Loss]:
    """Gradients of every adapter's summed loss, and the sums [K], over all A microbatches."""
    objective, model = plan.run.objective, plan.run.model
    how = select.for_lanes(plan.how, batch.tokens.shape[1], model.embed_dim)
    params = {m.path: m.param for one in active for m in one.modules}
    keys = [jax.random.fold_in(jax.random.key(plan.run.seed), count) for count in counts]
    rates = [one.dropout for one in active]

    def lane(parts: Parts, rows: Batch, key: Array, rate: Array, index: Array | int) -> Loss:
        key = jax.random.fold_in(key, index)
        drop = (jax.random.fold_in(key, 1), rate) if any(rates) else ()
        return objective.loss(model, bind(params, base, parts, *drop), rows, key, how)

    def one(rows: Batch, index: Array | int) -> tuple[Tree, Loss]:
        def total(trained: Tree) -> tuple[Array, Loss]:
            parts = [scaled(adapter, trained[adapter.name]) for adapter in active]
            if len(lanes.adapters) == 1:
                alone = lane(parts[0], rows, keys[0], jnp.float32(rates[0]), index)
                loss = jax.tree.map(lambda a: a[None], alone)
            else:
                each = _by_lane(partial(lane, index=index), lanes)
                loss = each(stack_parts(params, parts, lanes.adapters), rows, keys, rates)
            return jnp.sum(loss.total), loss

        (_, loss), grads = jax.value_and_grad(total, has_aux=True)(trained)
        return grads, loss

    num = batch.tokens.shape[0]
    if num == 1 or num_stages() > 1:
        return one(jax.tree.map(interleaved, batch), 0)

    def body(sums: tuple[Tree, Loss], piece: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(*piece)), None

    first = jax.tree.map(lambda a: a[0], batch)
    shapes = jax.eval_shape(one, first, 0)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(body, zeros, (batch, jnp.arange(num)))[0]


def _by_lane(lane: Callable[..., Loss], lanes: Lanes) -> Callable[..., Loss]:
    """From stacked parts, rows and the adapters' keys and rates to sums [K], all lanes at once."""
    num, of = len(lanes.adapters), jnp.array(lanes.adapters)
    count = max(lanes.adapters) + 1

    def each(parts: Parts, rows: Batch, keys: Sequence[Array], rates: Sequence[float]) -> Loss:
        cut = jax.tree.map(lambda a: a.reshape(-1, num, *a.shape[1:]).swapaxes(0, 1), rows)
        mapped = jax.vmap(lane)
        losses = mapped(parts, cut, jnp.stack(keys)[of], jnp.array(rates, jnp.float32)[of])
        return jax.tree.map(lambda a: jax.ops.segment_sum(a, of, num_segments=count), losses)

    return each


def stack_parts(params: Mapping[str, Param], parts: Sequence[Parts], order: Sequence[int]) -> Parts:
    """Arrays of several adapters with a lane axis in front, ranks padded with zeros."""
    stacked = {}
    for path, param in params.items():
        width = max(part[path]["a"].shape[-1] for part in parts)
        padded = [_padded(part[path], len(param.batch), width) for part in parts]
        stacked[path] = {name: jnp.stack([padded[i][name] for i in order]) for name in padded[0]}
    return stacked


def _padded(part: Mapping[str, Array], axis: int, width: int) -> dict[str, Array]:
    """`a` [..., R] and `b` [..., R at `axis`, ...] with zeros up to rank `width`."""
    a, b = part["a"], part["b"]
    missing = width - a.shape[-1]
    wider = {
        "a": jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)]),
        "b": jnp.pad(b, [(0, missing if i == axis else 0) for i in range(b.ndim)]),
    }
    return dict(part) | wider if missing else dict(part)
