"""Builds an optax optimizer from the `optim` section and the arrows of the weights.

    grads --clip--> g --rule of each weight--> d --> -rate * (d + weight_decay * w)
                            |                                    (matrices only)
                          state {"count": int32, slot: tree of arrays, ...}

A slot's tree has the names of the weights' tree, less the weights that have no such slot.
The state holds arrays only, and `state_spec` gives the axes of each: it shards as weights do.

Steps of a schedule count from 0: step k is the rate of update k + 1, as in optax and transformers,
so the first update of a warm-up has rate zero and the floor is reached at step `total_steps`.
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from lmwright.config.registry import Registry
from lmwright.core.param import Param, Tree, nest, walk
from lmwright.errors import UserError
from lmwright.optim import KINDS, kinds
from lmwright.optim.kinds import Optim, Schedule
from lmwright.optim.rule import Rule, Slot, Slots

if TYPE_CHECKING:
    import optax

RULES: Mapping[str, Rule] = Registry(__package__, {kind: kind.replace("-", "_") for kind in KINDS})
"""Modules of the optimizers; each has the name of its kind."""

Rate = Callable[[ArrayLike], Array]

# progress of the fall in [0, 1] -> what is left of it
_FALLS = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: 0.5 * (1 + jnp.cos(math.pi * p)),
    "sqrt": lambda p: 1 - jnp.sqrt(p),
}


def build_optimizer(
    optim: Optim, spec: Tree, total_steps: int
) -> "optax.GradientTransformationExtraArgs":
    """Optimizer of the weights that `spec` declares; clipping is left to `clip`.

    `init(weights)` is the state; `update(grads, state, weights)` gives float32 updates for
    `optax.apply_updates`, and the new state. The schedule is at `schedule_step`, the number of
    updates if unset. Where `sound` is False, moments on the host stay. Raises UserError.
    """
    import optax  # 0.2 s, which a plan on paper need not wait for

    params = dict(walk(spec))
    shares = rate_shares(optim, params)
    rule = RULES[optim.kind]
    schedule = make_schedule(optim, total_steps)

    def init(weights: Tree) -> dict[str, Any]:
        del weights
        return jax.tree.map(
            lambda s: jnp.zeros(s.param.shape, s.dtype), state_slots(optim, spec), is_leaf=_is_slot
        )

    def update(
        grads: Tree,
        state: dict[str, Any],
        weights: Tree | None = None,
        *,
        schedule_step: Array | None = None,
        sound: Array | bool = True,
    ) -> Any:
        if weights is None:
            raise ValueError("update needs the weights: decay and step sizes depend on them")
        count = state["count"]
        at = count if schedule_step is None else schedule_step
        rate, decay = schedule(at), optim.weight_decay
        if optim.weight_decay_until < 1:
            decay = jnp.where(at < optim.weight_decay_until * total_steps, decay, 0.0)
        t = (count + 1).astype(jnp.float32)
        w, slots = dict(walk(weights)), _by_weight(state)
        updates: dict[str, Array] = {}
        leaves: list[tuple[str, str, Array]] = []
        for path, g in walk(grads):
            param, g = params[path], g.astype(jnp.float32)
            if param.balance_rate is not None:
                updates[path] = -param.balance_rate * jnp.sign(g)
                continue
            direction = partial(rule.direction, replace(optim, weight_decay=decay))
            if is_on_host(optim, param):
                direction = through_host(direction, sound)
            step, new = direction(param, g, w[path], slots[path], t)
            if param.is_matrix and optim.weight_decay:
                step = step + decay * w[path]
            updates[path] = -(rate * shares[path] if path in shares else rate) * step
            leaves += [(name, path, array) for name, array in new.items()]
        return nest(updates.items()), _state(count + 1, leaves)

    return optax.GradientTransformationExtraArgs(init, update)


def is_on_host(optim: Optim, param: Param) -> bool:
    """True if `optim.offload` keeps the moments of this weight, a matrix, on the host."""
    return optim.offload == "moments" and param.is_matrix


def through_host(direction: Callable[..., Any], sound: Array | bool) -> Callable[..., Any]:
    """`direction(param, g, w, slots, t)` for slots that are on the host: they are fetched and
    sent back, layer by layer where a weight is a stack of layers. The direction takes the
    place of the gradient. Where `sound` is False the slots stay as they are."""
    device, host = jax.memory.Space.Device, jax.memory.Space.Host

    def through(param: Param, g: Array, w: Array, slots: Slots, t: Array) -> Any:
        if param.batch[:1] == ("layers",):
            return stacked(param.unstacked(), g, w, slots, t)
        near = jax.device_put(dict(slots), device)
        step, new = direction(param, g, w, near, t)
        return step, jax.device_put(jax.tree.map(partial(jnp.where, sound), new, near), host)

    def stacked(layer: Param, g: Array, w: Array, slots: Slots, t: Array) -> Any:
        def body(i: Array, carry: Any) -> Any:
            pick = partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
            g, slots = carry
            return jax.tree.map(put, carry, through(layer, *jax.tree.map(pick, (g, w, slots)), t))

        return jax.lax.fori_loop(0, g.shape[0], body, (g, dict(slots)))

    return through


def gradient_norm(grads: Tree, spec: Tree) -> Array:
    """Global norm of the gradients of the loss, float32, without those that only carry counts."""
    import optax

    params = dict(walk(spec))
    return optax.tree.norm([g for path, g in walk(grads) if params[path].balance_rate is None])


def rate_shares(optim: Optim, paths: Iterable[str]) -> dict[str, float]:
    """Learning-rate factor of each weight that `optim.groups` names, by its dotted path.

    Raises UserError for a pattern that fits no weight.
    """
    shares: dict[str, float] = {}
    paths = list(paths)
    for number, group in enumerate(optim.groups):
        fitting = fnmatch.filter(paths, group.weights)
        if not fitting:
            raise UserError(
                f"optim.groups.{number}.weights: {group.weights!r} matches no weight; the weights "
                f"are {', '.join(sorted(paths))}"
            )
        shares |= dict.fromkeys(fitting, group.rate)
    return shares


def state_spec(optim: Optim, spec: Tree) -> Tree:
    """Param of each array of the state, in the state's own structure: its axes for sharding."""
    return jax.tree.map(lambda s: s.param, state_slots(optim, spec), is_leaf=_is_slot)


def on_host(optim: Optim, spec: Tree) -> Tree:
    """Marks of the arrays of the state that are on the host, in the state's own structure."""
    return jax.tree.map(lambda s: s.on_host, state_slots(optim, spec), is_leaf=_is_slot)


def clip(grads: Tree, norm: Array, clip_norm: float | None) -> Tree:
    """Gradients scaled so that their global norm, `norm` now, is at most `clip_norm`."""
    if clip_norm is None:
        return grads
    # the same small number as torch, so that curves can be compared
    scale = jnp.minimum(1.0, clip_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def clip_parts(grads: Tree, spec: Tree, clip_norm: float | None) -> Tree:
    """Gradients of several models, each scaled by its own norm, as by optimizers of their own."""
    norms = {name: gradient_norm(tree, spec[name]) for name, tree in grads.items()}
    return {name: clip(tree, norms[name], clip_norm) for name, tree in grads.items()}


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)


def state_slots(optim: Optim, spec: Tree) -> Tree:
    """Structure of the state with a Slot in place of each array."""
    rule = RULES[optim.kind]
    leaves = [
        (name, path, replace(slot, on_host=is_on_host(optim, param)))
        for path, param in walk(spec)
        if param.balance_rate is None
        for name, slot in rule.slots(optim, param).items()
    ]
    return _state(Slot(Param("", (), fill=0.0), "int32"), leaves)


def _state(count: Any, leaves: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Nested state {"count": ..., slot: tree} from (slot, path of the weight, leaf) triples."""
    return {"count": count, **nest((f"{name}.{path}", leaf) for name, path, leaf in leaves)}


def _by_weight(state: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
    """Slots of each weight: {path of the weight: {slot: array}}."""
    slots: dict[str, dict[str, Array]] = {}
    for name, tree in state.items():
        if name != "count":
            for path, array in walk(tree):
                slots.setdefault(path, {})[name] = array
    return slots


def make_schedule(optim: Optim, total_steps: int) -> Rate:
    """Function from step (int32 scalar or array) to learning rate (float32, same shape).

    Raises UserError where the steps of the schedule do not fit into `total_steps`.
    """
    kind = optim.schedule
    kind.refuse(total_steps)
    warmup = kind.warmup_steps
    peak = optim.learning_rate
    tail = _tail(kind, total_steps)

    def rate(step: ArrayLike) -> Array:
        step = jnp.asarray(step, jnp.float32)
        rise = step / warmup if warmup else jnp.ones_like(step)
        return peak * jnp.where(step < warmup, rise, tail(step))

    return rate


def _tail(kind: Schedule, total_steps: int) -> Rate:
    """Schedule after the warm-up, as a fraction of the highest rate."""
    match kind:
        case kinds.Constant():
            return jnp.ones_like
        case kinds.InverseSqrt():
            return lambda step: (jnp.maximum(step, 1) / kind.warmup_steps) ** -0.5
        case kinds.Wsd():
            return _fall(kind, kind.shape, kind.decay_steps, total_steps)
        case kinds.TwoStage():
            return _two_falls(kind, total_steps)
        case kinds.Exponential():
            return _exponential(kind, total_steps)
        case _:
            return _fall(kind, kind.kind, total_steps - kind.warmup_steps, total_steps)


def _two_falls(kind: kinds.TwoStage, total_steps: int) -> Rate:
    switch = int(total_steps * kind.switch_fraction)

    def tail(step: Array) -> Array:
        first = (step - kind.warmup_steps) / (switch - kind.warmup_steps)
        second = jnp.clip((step - switch) / (total_steps - switch), 0, 1)
        before = 1 + (kind.first_floor_fraction - 1) * first
        after = kind.second_fraction + (kind.floor_fraction - kind.second_fraction) * second
        return jnp.where(step < switch, before, after)

    return tail


def _exponential(kind: kinds.Exponential, total_steps: int) -> Rate:
    last = total_steps - (cooldown := kind.cooldown_steps)

    def tail(step: Array) -> Array:
        progress = jnp.clip((step - kind.warmup_steps) / (last - kind.warmup_steps), 0, 1)
        rest = 1 - (step - last) / cooldown if cooldown else jnp.ones_like(step)
        return kind.floor_fraction**progress * jnp.clip(rest, 0, 1)

    return tail


def _fall(
    kind: kinds.Linear | kinds.Cosine | kinds.Wsd, shape: str, fall_steps: int, total_steps: int
) -> Rate:
    """Decay from one to the floor over the last `fall_steps` of the run."""
    start, floor = total_steps - fall_steps, kind.floor_fraction

    def tail(step: Array) -> Array:
        progress = jnp.clip((step - start) / fall_steps, 0, 1)
        return floor + (1 - floor) * _FALLS[shape](progress)

    return tail
