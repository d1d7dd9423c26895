"""Rule: the update of one weight; each kind of optimizer is a module of two functions.

    slots(optim, param)                                what it remembers of one weight
    direction(optim, param, g, w, slots, t)            where to go, and what to remember

`g`, `w` and the direction have the weight's shape. `slots` maps names to arrays; `t` counts
updates from 1 (float32). Learning rate and weight decay belong to `build`, for all kinds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim.kinds import Optim

Slots = Mapping[str, Array]


@dataclass(frozen=True)
class Slot:
    """One array of optimizer state: its shape and axes as a Param, and its dtype."""

    param: Param
    dtype: str = "float32"
    on_host: bool = False


class Rule(Protocol):
    """Interface of the module of an optimizer."""

    def slots(self, optim: Optim, param: Param) -> dict[str, Slot]: ...

    def direction(
        self, optim: Optim, param: Param, g: Array, w: Array, slots: Slots, t: Array
    ) -> tuple[Array, dict[str, Array]]: ...


def slot(axes: tuple[str, ...], shape: tuple[int, ...], dtype: str = "float32") -> Slot:
    """Slot whose axes are sharded like the axes of the weight with the same names."""
    return Slot(Param(" ".join(axes), shape, fill=0.0), dtype)


def like(param: Param, dtype: str = "float32") -> Slot:
    """Slot with the axes and shape of the weight."""
    return slot(param.axes, param.shape, dtype)


def unbias(beta: float, t: Array) -> Array:
    """Bias correction 1 - beta**t without cancellation: the part of a mean that t updates have
    filled."""
    if beta == 0:
        return jnp.ones_like(t)
    return -jnp.expm1(t * math.log(beta))
