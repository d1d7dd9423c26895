"""Recurrences whose backward pass begins with their inputs: what happens on the way is computed
again, not kept."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION


def keeps_inputs(run: Callable[..., Array]) -> Callable[..., Array]:
    """`run` of q, k, v, two gates, segment ids and a static setting, whose backward pass keeps the
    first six alone. Its result has the name of attention's for rematerialization policies."""

    def forward(*inputs: Any) -> tuple[Array, tuple[Array, ...]]:
        return checkpoint_name(run(*inputs), ATTENTION), inputs[:-1]

    def backward(setting: Any, inputs: tuple[Array, ...], g: Array) -> tuple[Array | None, ...]:
        *arrays, ids = inputs
        return *jax.vjp(lambda *arrays: run(*arrays, ids, setting), *arrays)[1](g), None

    rule = jax.custom_vjp(run, nondiff_argnums=(6,))
    rule.defvjp(forward, backward)
    return rule
