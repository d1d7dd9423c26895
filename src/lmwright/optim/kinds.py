"""Fields of the optimizer and learning-rate sections of a run file; does not import jax.

    [optim]                        [optim.schedule]
    kind = "adamw"                 kind = "cosine"
    learning_rate = 3e-4           warmup_steps = 200

A rate is in units of weight per step. The string under a field is its help text.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

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
    least_fall: ClassVar[int] = 0  # steps of decay at the end of the run

    def refuse(self, num_steps: int) -> None:
        """Raises UserError where the schedule does not fit into the steps of a run."""
        fall_steps = self.decay_steps if isinstance(self, Wsd) else self.least_fall
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


@section
class InverseSqrt(WarmUp):
    """Warm-up, then a rate that falls with the square root of the step, without an end."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    warmup_steps: PositiveInt
    """Steps of linear rise from zero; four times as many steps halve the rate."""


Schedule = Annotated[
    Constant | Linear | Cosine | Wsd | InverseSqrt,
    Field(discriminator="kind"),
]


@section
class Group:
    """Weights that learn at a different rate."""

    weights: str
    """Pattern of their names, as `embed`, `layers.*norm` or `layers.[qkvo]`."""
    rate: NonNegative
    """What the learning rate is multiplied by; 0 keeps them as they are."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Fields that every optimizer has; pydantic does not find docstrings of inherited fields."""

    learning_rate: Annotated[Positive, Field(description="Highest rate; the schedule scales it.")]
    schedule: Annotated[Schedule, Field(description="Rate over the steps of the run.")] = field(
        default_factory=Cosine
    )
    weight_decay: Annotated[
        NonNegative,
        Field(description="Matrices (weights with an arrow) shrink by rate times this each step."),
    ] = 0.1
    clip_norm: Annotated[
        Positive | None,
        Field(description="Longer gradients, over all weights, are scaled to it; unset: never."),
    ] = 1.0
    offload: Annotated[
        Free[Literal["none", "moments"]],
        Field(description="Where the moments of matrices are: on the devices, or on the host."),
    ] = "none"
    groups: Annotated[
        tuple[Group, ...],
        Field(description="Weights with rates of their own; of several that fit the last counts."),
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


@section
class Adafactor(Common):
    """A row and a column of second moments per matrix (https://arxiv.org/abs/1804.04235)."""

    kind: Literal["adafactor"] = "adafactor"
    decay_exponent: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The second moment at step t forgets with 1 - t**-decay_exponent."""
    eps: Positive = 1e-30
    """Added to squared gradients."""
    update_rms: Positive = 1.0
    """An update with a greater root mean square is scaled down to it, matrix by matrix."""
    step_size: Literal["relative", "absolute"] = "relative"
    """`relative` multiplies the rate by the root mean square of the weight."""
    min_weight_rms: Positive = 1e-3
    """Least root mean square of a weight that a relative step assumes."""


@section
class Lion(Common):
    """Sign of a mix of momentum and gradient (https://arxiv.org/abs/2302.06675)."""

    kind: Literal["lion"] = "lion"
    beta1: Fraction = 0.9
    """Share of the momentum in the mix whose sign is the update."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Decay of the momentum."""


@section
class Muon(Common):
    """Orthogonalized momentum for hidden matrices (https://kellerjordan.github.io/posts/muon/).

    Weights with a vocabulary axis, and those that are no matrices, get AdamW.
    """

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Decay of the mean of gradients."""
    momentum_form: Literal["nesterov", "plain"] = "nesterov"
    """`nesterov` mixes the newest gradient in once more."""
    newton_schulz_steps: Annotated[int, Field(gt=0, le=20)] = 5
    """Iterations that orthogonalize."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Operands of those matmuls; a TPU rounds fp32 operands to bf16 by itself."""
    scale: Literal["rms", "width"] = "rms"
    """`rms` gives updates the size of AdamW's (0.2 * sqrt(max(fan-in, fan-out))), so that one
    rate serves all weights; `width` is the original sqrt(max(1, fan-out / fan-in))."""
    adamw_rate_ratio: Positive = 1.0
    """Rate of the weights that get AdamW, over `learning_rate`."""
    beta1: Fraction = 0.9
    """As in adamw, for the weights that get it."""
    beta2: Fraction = 0.95
    """As in adamw, for the weights that get it."""
    eps: Positive = 1e-8
    """As in adamw, for the weights that get it."""


Optim = AdamW | Adam8bit | Adafactor | Lion | Muon
