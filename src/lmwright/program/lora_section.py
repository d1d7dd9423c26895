"""Adapters in a run file: the section `[lora]` and its `[[lora.adapters]]`.

The string under a field is its help text. This module does not import jax.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import Fraction, Positive, PositiveInt, section
from lmwright.optim.kinds import Schedule

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


@section
class Adapter:
    """One of several adapters that train at once; what it does not say is the run's."""

    name: Name
    data: str | None = None
    """Folder of its prepared data; that of `data.dir` if unset."""
    rows: PositiveInt | None = None
    """Its rows of each step; an equal share of `train.global_batch_size` if unset."""
    steps: PositiveInt | None = None
    """Its optimizer steps; `train.steps` if unset."""
    learning_rate: Positive | None = None
    """Highest rate; that of `optim` if unset."""
    schedule: Schedule | None = None
    """Rate over its own steps; that of `optim` if unset."""
    rank: PositiveInt | None = None
    """In place of `lora.rank`."""
    alpha: Positive | None = None
    """In place of `lora.alpha`."""
    dropout: Fraction | None = None
    """In place of `lora.dropout`."""
    patience: PositiveInt | None = None
    """It stops after so many evaluations without a lower held-out loss; never if unset."""
    init_from: str | None = None
    """PEFT folder that it starts from."""


@section
class LowRank:
    """LoRA (https://arxiv.org/abs/2106.09685): the model stays as it is, and every targeted
    matrix gets a trained sum of low rank."""

    kind: Literal["lora"] = "lora"
    base: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    """How the frozen weights are kept; int8 and int4 (QLoRA) hold the matrices of the layers,
    the rest is bf16."""
    targets: tuple[str, ...] = ("all",)
    """`attention`, `mlp`, `experts`, `all` (every matrix of the layers), or names such as
    `q_proj` or `layers.q`."""
    rank: PositiveInt = 16
    """Width of the sum."""
    alpha: Positive = 32.0
    """The sum is scaled by alpha over rank."""
    ranks: dict[str, PositiveInt] = field(default_factory=dict)
    """Rank of some targets, as in `ranks.mlp = 8`; the last that fits counts."""
    alphas: dict[str, Positive] = field(default_factory=dict)
    """Alpha of some targets."""
    scaling: Literal["rank", "sqrt-rank"] = "rank"
    """`sqrt-rank` divides alpha by the root of the rank (rsLoRA,
    https://arxiv.org/abs/2312.03732)."""
    variant: Literal["lora", "dora"] = "lora"
    """`dora` trains the norm of each output beside it (https://arxiv.org/abs/2402.09353)."""
    dropout: Fraction = 0.0
    """Share of the sum's inputs that is dropped in training."""
    b_rate_ratio: Positive = 1.0
    """Rate of the second factor over that of the first (LoRA+,
    https://arxiv.org/abs/2402.12354)."""
    init_from: str | None = None
    """PEFT folder that the adapter starts from; a fresh one if unset."""
    adapters: tuple[Adapter, ...] = ()
    """Several at once on one frozen base; a single one, called `default`, if none is listed."""


KINDS = {"lora": LowRank}
"""The ways to train a little beside a frozen base."""
