"""Learning rate as a function of the step.

Steps count from 0: step k is the rate of update k + 1, as in optax and transformers, so the
first update of a warm-up has rate zero and the floor is reached at step `total_steps`.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from lmwright.errors import UserError
from lmwright.optim.kinds import Constant, Cosine, InverseSqrt, Linear, Optim, Wsd

Rate = Callable[[ArrayLike], Array]

# progress of the fall in [0, 1] -> what is left of it
_FALLS = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: 0.5 * (1 + jnp.cos(math.pi * p)),
    "sqrt": lambda p: 1 - jnp.sqrt(p),
}


def make_schedule(optim: Optim, total_steps: int) -> Rate:
    """Function from step (int32 scalar or array) to learning rate (float32, same shape).

    Raises UserError where the steps of the schedule do not fit into `total_steps`.
    """
    kind = optim.schedule
    warmup = kind.warmup_steps
    peak = optim.learning_rate
    tail = _tail(kind, total_steps)

    def rate(step: ArrayLike) -> Array:
        step = jnp.asarray(step, jnp.float32)
        rise = step / warmup if warmup else jnp.ones_like(step)
        return peak * jnp.where(step < warmup, rise, tail(step))

    return rate


def _tail(kind: Constant | Linear | Cosine | Wsd | InverseSqrt, total_steps: int) -> Rate:
    """Schedule after the warm-up, as a fraction of the highest rate."""
    match kind:
        case Constant():
            return jnp.ones_like
        case InverseSqrt():
            return lambda step: (jnp.maximum(step, 1) / kind.warmup_steps) ** -0.5
        case Wsd():
            return _fall(kind, kind.shape, kind.decay_steps, total_steps)
        case _:
            return _fall(kind, kind.kind, total_steps - kind.warmup_steps, total_steps)


def _fall(kind: Linear | Cosine | Wsd, shape: str, fall_steps: int, total_steps: int) -> Rate:
    """Decay from one to the floor over the last `fall_steps` of the run."""
    start = total_steps - fall_steps
    if fall_steps <= 0 or start < kind.warmup_steps:
        rest = f" and decay_steps {kind.decay_steps}" if isinstance(kind, Wsd) else ""
        raise UserError(
            f"optim.schedule.warmup_steps: {kind.warmup_steps}{rest} do not fit into "
            f"train.steps {total_steps}; lower them or train longer"
        )
    floor = kind.floor_fraction

    def tail(step: Array) -> Array:
        progress = jnp.clip((step - start) / fall_steps, 0, 1)
        return floor + (1 - floor) * _FALLS[shape](progress)

    return tail
