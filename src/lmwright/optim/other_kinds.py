"""Fields of the optimizers beside AdamW; a run of another one needs none of this."""

from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import Fraction, Positive, section
from lmwright.optim.kinds import Adam, Common


@section
class StableAdamW(Adam):
    """AdamW whose rate falls where the second moment of a tensor is behind its gradient
    (https://arxiv.org/abs/2304.13013)."""

    kind: Literal["stable-adamw"] = "stable-adamw"


@section
class Adafactor(Common):
    """A row and a column of second moments per matrix (https://arxiv.org/abs/1804.04235)."""

    kind: Literal["adafactor"] = "adafactor"
    decay_exponent: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Exponent of the second moment's decay: at step t it forgets with 1 - t**-decay_exponent."""
    eps: Positive = 1e-30
    """Number added to squared gradients."""
    update_rms: Positive = 1.0
    """Root mean square to which a greater update is scaled down, matrix by matrix."""
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
    """Precision of the operands of those matmuls; a TPU rounds fp32 operands to bf16 by itself."""
    scale: Literal["rms", "width"] = "rms"
    """`rms` gives updates the size of AdamW's (0.2 * sqrt(max(fan-in, fan-out))), so that one
    rate serves all weights; `width` is the original sqrt(max(1, fan-out / fan-in))."""
    adamw_rate_ratio: Positive = 1.0
    """Rate of the weights that get AdamW, over `learning_rate`."""
    beta1: Fraction = 0.9
    """`beta1` of AdamW, for the weights that get it."""
    beta2: Fraction = 0.95
    """`beta2` of AdamW, for the weights that get it."""
    eps: Positive = 1e-8
    """`eps` of AdamW, for the weights that get it."""
