"""Ramp: a share that moves in a straight line during a run.

    start -----+
                \\
                 +----- end
         after   until
"""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import section
from lmwright.errors import UserError

Share = Annotated[float, Field(ge=0, le=1)]

TIE = 2.0**-20
"""Added to a share before its count is rounded, so that the last bits of a product, which differ
between programs, decide no tie."""


@section
class Ramp:
    """A share that changes during a run; another form of a number."""

    start: Share
    """The share at the start."""
    end: Share
    """The share at the end."""
    after: Share = 0.0
    """Part of the run's steps before it moves."""
    until: Share = 1.0
    """Part of the run's steps at which it has arrived; as `after` for a jump."""

    def refuse(self, where: str) -> None:
        """Raises UserError, prefixed with `where`, for one that does not move, or ends before it
        begins."""
        if self.until < self.after:
            raise UserError(
                f"{where}.until: {self.until:g} is less than after = {self.after:g}; make it at "
                "least as large"
            )
        if self.start == self.end:
            raise UserError(
                f"{where}.end: {self.end:g} equals start, so nothing changes; write that number in "
                "place of the table"
            )

    def at(self, progress: Array | float) -> Array:
        """The share, float32, when so much of the run in [0, 1] is done."""
        progress = jnp.asarray(progress, jnp.float32)
        if self.until == self.after:
            return jnp.where(progress < self.after, self.start, self.end)
        moved = jnp.clip((progress - self.after) / (self.until - self.after), 0, 1)
        return self.start + (self.end - self.start) * moved


def ends(share: float | Ramp) -> tuple[float, float]:
    """The share at first and at last."""
    return (share.start, share.end) if isinstance(share, Ramp) else (share, share)


def now(share: float | Ramp, progress: Array | float) -> Array | float:
    """The share when so much of the run in [0, 1] is done."""
    return share.at(progress) if isinstance(share, Ramp) else share


def count_of(share: float | Ramp, progress: Array | float, whole: Array) -> Array:
    """Number of the `whole` that the share is, rounded, int32."""
    if not isinstance(share, Ramp):
        return jnp.round(share * whole).astype(jnp.int32)
    return jnp.floor((share.at(progress) + TIE) * whole + 0.5).astype(jnp.int32)
