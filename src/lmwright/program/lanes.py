"""Lanes: how the rows of a microbatch belong to trainees that train side by side.

    rows of the batch   a b c a b c a b c ...    row i belongs to lane i mod J
    lanes               a  b  c                  each lane has one trainee and equally many rows

A trainee with more rows than others has several lanes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.contract import Batch, Loss
from lmwright.core.sharding import batch_ways
from lmwright.errors import UserError
from lmwright.program.plan import Plan
from lmwright.program.trainee import Trainee


@dataclass(frozen=True)
class Lanes:
    """Row i of a microbatch belongs to `trainees[i % len(trainees)]`."""

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
            if trainee.rows % (num * ways):
                raise UserError(
                    f"lora.adapters.rows: {trainee.rows} of {trainee.name!r} do not divide into "
                    f"{num} microbatches over {ways} batch shards; use a multiple of {num * ways}"
                )
        if len(active) == 1:
            return cls((0,), active[0].rows // num)
        rows = math.gcd(*(trainee.rows // num // ways for trainee in active)) * ways
        lanes = [i for i, trainee in enumerate(active) for _ in range(trainee.rows // num // rows)]
        return cls(tuple(lanes), rows)

    def losses(
        self,
        loss: Callable[[Any, Batch, Array, Array], Loss],
        stacked: Any,
        rows: Batch,
        keys: Sequence[Array],
        rates: Sequence[float],
    ) -> tuple[Loss, ...]:
        """The loss of each trainee, all lanes at once: `loss` takes one lane's parts, rows
        [B, T], key and dropout. `stacked` has a leading lane axis."""
        num, of = len(self.trainees), jnp.array(self.trainees)
        count = max(self.trainees) + 1
        cut = jax.tree.map(lambda a: a.reshape(-1, num, *a.shape[1:]).swapaxes(0, 1), rows)
        each = jax.vmap(loss)(stacked, cut, jnp.stack(keys)[of], jnp.array(rates, jnp.float32)[of])
        sums = jax.tree.map(lambda a: jax.ops.segment_sum(a, of, num_segments=count), each)
        return tuple(jax.tree.map(lambda a, i=i: a[i], sums) for i in range(count))
