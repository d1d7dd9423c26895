"""Fields of the optimizer and learning-rate sections of a run file; does not import jax.

    [optim]                        [optim.schedule]
    kind = "adamw"                 kind = "cosine"
    learning_rate = 3e-4           warmup_steps = 200

A rate is in units of weight per step. The string under a field is its help text.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from lmwright.config.run import (
    Fraction,
    Free,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    section,
)
from lmwright.errors import UserError

UnitFraction = Annotated[float, Field(ge=0, le=1)]


class WarmUp:
    """The linear rise from zero that all schedules begin with."""

    warmup_steps: int
    least_fall: ClassVar[int] = 0  # steps of a decay

    def fall_steps(self, num_steps: int) -> int:
        """The fewest steps after the warm-up of a run of `num_steps`."""
        return self.least_fall

    def refuse(self, num_steps: int) -> None:
        """Raises UserError where the schedule does not fit into the steps of a run."""
        fall_steps = self.fall_steps(num_steps)
        if self.warmup_steps + fall_steps > num_steps:
            decay = f" before {fall_steps} of decay" if fall_steps else ""
            raise UserError(
                f"optim.schedule.warmup_steps: {self.warmup_steps} steps do not fit into "
                f"train.steps = {num_steps}{decay}; shorten them or train longer"
            )


@section
class Constant(WarmUp):
    """Warm-up, then a constant rate to the end."""

    kind: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""


@section
class Linear(WarmUp):
    """Warm-up, then a linear decay to the floor at the last step."""

    least_fall: ClassVar[int] = 1
    kind: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    floor_fraction: UnitFraction = 0.0
    """Rate at the end, as a share of `learning_rate`."""


@section
class Cosine(WarmUp):
    """Warm-up, then half a cosine down to the floor at the last step."""

    least_fall: ClassVar[int] = 1
    kind: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    floor_fraction: UnitFraction = 0.1
    """Rate at the end, as a share of `learning_rate`."""


@section
class Wsd(WarmUp):
    """Warm-up, stable, decay: the decay is the last `decay_steps` of the run."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    decay_steps: PositiveInt
    """Steps of the fall at the end."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Form of the fall; `sqrt` is one minus the square root of its progress."""
    floor_fraction: UnitFraction = 0.0
    """Rate at the end, as a share of `learning_rate`."""

    def fall_steps(self, num_steps: int) -> int:
        """The decay."""
        return self.decay_steps


@section
class InverseSqrt(WarmUp):
    """Warm-up, then a rate that falls with the square root of the step, without an end."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    warmup_steps: PositiveInt
    """Steps of linear rise from zero; four times as many steps halve the rate."""


@section
class TwoStage(WarmUp):
    """Warm-up, then two linear falls; the second begins lower than the first ends
    (https://arxiv.org/abs/2504.12285)."""

    kind: Literal["two-stage"] = "two-stage"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    switch_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the steps that the first stage has, warm-up among them."""
    first_floor_fraction: UnitFraction = 8 / 15
    """Rate at the end of the first stage, as a share of `learning_rate`."""
    second_fraction: UnitFraction = 1 / 3
    """Rate at the beginning of the second stage, as a share of `learning_rate`."""
    floor_fraction: UnitFraction = 0.0
    """Rate at the end, as a share of `learning_rate`."""

    def fall_steps(self, num_steps: int) -> int:
        """A step of the first fall, and the second stage."""
        return num_steps - int(num_steps * self.switch_fraction) + 1


@section
class Exponential(WarmUp):
    """Warm-up, exponential decay to the floor, then a linear cool-down to zero
    (https://arxiv.org/abs/2503.13427)."""

    least_fall: ClassVar[int] = 1
    kind: Literal["exponential"] = "exponential"
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    floor_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Rate at the end of the exponential decay, as a share of `learning_rate`."""
    cooldown_steps: NonNegativeInt = 0
    """Steps of linear fall to zero at the end of the run."""

    def fall_steps(self, num_steps: int) -> int:
        """A step of the decay, and the cool-down."""
        return self.least_fall + self.cooldown_steps


Schedule = Annotated[
    Constant | Linear | Cosine | Wsd | InverseSqrt | TwoStage | Exponential,
    Field(discriminator="kind"),
]


@section
class Group:
    """Weights that learn at a different rate."""

    weights: str
    """Pattern of the names of weights, as `embed`, `layers.*norm` or `layers.[qkvo]`."""
    rate: NonNegative
    """Factor on the learning rate; 0 keeps the weights as they are."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Fields that every optimizer has; pydantic does not find docstrings of inherited fields."""

    if TYPE_CHECKING:
        kind: str
    learning_rate: Annotated[Positive, Field(description="Highest rate; the schedule scales it.")]
    schedule: Annotated[Schedule, Field(description="Rate over the steps of the run.")] = field(
        default_factory=Cosine
    )
    weight_decay: Annotated[
        NonNegative,
        Field(description="Matrices (weights with an arrow) shrink by rate times this each step."),
    ] = 0.1
    weight_decay_until: Annotated[
        UnitFraction, Field(description="Share of the steps after which nothing shrinks.")
    ] = 1.0
    clip_norm: Annotated[
        Positive | None,
        Field(description="Longer gradients, over all weights, are scaled to it; unset: never."),
    ] = 1.0
    clip_over: Annotated[
        Literal["all", "part"],
        Field(description="Weights clipped together: all, or each of the two models of `rtd`."),
    ] = "all"
    offload: Annotated[
        Free[Literal["none", "moments"]],
        Field(description="Where the moments of matrices are: on the devices, or on the host."),
    ] = "none"
    groups: Annotated[
        tuple[Group, ...],
        Field(description="Weights with their own rates; the last pattern that matches applies."),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Adam(Common):
    """Fields that both forms of Adam have."""

    beta1: Annotated[Fraction, Field(description="Decay of the mean of gradients.")] = 0.9
    beta2: Annotated[Fraction, Field(description="Decay of the mean of squared gradients.")] = 0.95
    eps: Annotated[Positive, Field(description="Added to the root of the second moment.")] = 1e-8


@section
class AdamW(Adam):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"] = "adamw"


@section
class Adam8bit(Adam):
    """AdamW whose moments are 8-bit codes by blocks (https://arxiv.org/abs/2110.02861)."""

    kind: Literal["adam8bit"] = "adam8bit"


Optim = Common
