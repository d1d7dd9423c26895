"""Adapters in a run file: the section `[lora]` and its `[[lora.adapters]]`.

The string under a field is its help text. This module does not import jax.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import Fraction, Free, Place, Positive, PositiveInt, Run, section
from lmwright.errors import UserError
from lmwright.optim.kinds import Schedule

DEFAULT = "default"  # what PEFT calls a single adapter
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


@section
class Adapter:
    """One of several adapters that train at once; fields that are unset are the run's."""

    name: Name
    data: Free[Place[str | None]] = None
    """Folder of its prepared data; that of `data.dir` if unset."""
    rows: Free[PositiveInt | None] = None
    """Rows of each of its steps; an equal share of `train.global_batch_size` if unset."""
    steps: Free[PositiveInt | None] = None
    """Number of its optimizer steps; `train.steps` if unset."""
    learning_rate: Positive | None = None
    """Highest rate; that of `optim` if unset."""
    schedule: Schedule | None = None
    """Rate over its own steps; that of `optim` if unset."""
    rank: PositiveInt | None = None
    """Overrides `lora.rank`."""
    alpha: Positive | None = None
    """Overrides `lora.alpha`."""
    dropout: Fraction | None = None
    """Overrides `lora.dropout`."""
    patience: Free[PositiveInt | None] = None
    """Evaluations without a lower held-out loss after which it stops; never if unset."""
    init_from: Free[Place[str | None]] = None
    """PEFT folder that it starts from."""


SMALL = ("int8", "int4", "mxfp4")
"""Values of `lora.base` that hold matrices in fewer bits."""


@section
class LowRank:
    """LoRA (https://arxiv.org/abs/2106.09685): the model is frozen, and a trained product of
    low rank is added to every targeted matrix."""

    kind: Literal["lora"] = "lora"
    base: Literal["fp32", "bf16", "int8", "int4", "mxfp4"] = "bf16"
    """Storage of the frozen weights; int8 and int4 (QLoRA) hold the matrices of the layers, mxfp4
    those of experts, exactly as gpt-oss is released; the rest is bf16."""
    targets: tuple[str, ...] = ("all",)
    """`attention`, `mlp`, `experts`, `all` (every matrix of the layers), or names such as
    `q_proj` or `layers.q`."""
    rank: PositiveInt = 16
    """Rank of the product."""
    alpha: Positive = 32.0
    """The product is scaled by alpha / rank."""
    ranks: dict[str, PositiveInt] = field(default_factory=dict)
    """Rank of some targets, as in `ranks.mlp = 8`; the last match wins."""
    alphas: dict[str, Positive] = field(default_factory=dict)
    """Alpha of some targets."""
    scaling: Literal["rank", "sqrt-rank"] = "rank"
    """`sqrt-rank` divides alpha by the root of the rank (rsLoRA,
    https://arxiv.org/abs/2312.03732)."""
    whole: tuple[str, ...] = ()
    """Weights outside of the layers that are trained whole beside the factors, from the base's on:
    `embed`, `head`, `norm`, or PEFT's names for them (its `modules_to_save`)."""
    variant: Literal["lora", "dora"] = "lora"
    """`dora` trains the norm of each output beside it (https://arxiv.org/abs/2402.09353)."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' inputs in training."""
    b_rate_ratio: Positive = 1.0
    """Learning rate of the second factor relative to the first (LoRA+,
    https://arxiv.org/abs/2402.12354)."""
    init_from: Free[Place[str | None]] = None
    """PEFT folder that the adapter starts from; a fresh one if unset."""
    adapters: tuple[Adapter, ...] = ()
    """Several at once on one frozen base; a single one, called `default`, if none is listed."""

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """The adapters, in order."""
        return self.adapters or (Adapter(name=DEFAULT, init_from=self.init_from),)

    def dropout_of(self, adapter: Adapter) -> float:
        """Dropout of the inputs of an adapter."""
        return self.dropout if adapter.dropout is None else adapter.dropout

    def rows_of(self, batch_size: int) -> dict[str, int]:
        """Rows of a step by adapter. Raises UserError where they do not add up to a batch."""
        given = {adapter.name: adapter.rows for adapter in self.listed}
        open_names = [name for name, rows in given.items() if rows is None]
        left = batch_size - sum(rows or 0 for rows in given.values())
        share = left // len(open_names) if open_names else 0
        if left < 0 or left - share * len(open_names) or (open_names and not share):
            raise UserError(
                f"lora.adapters.rows: {batch_size} rows of train.global_batch_size cannot be "
                f"distributed ({left} are left for {len(open_names)} adapters without rows of "
                "their own); make them add up"
            )
        return {name: share if rows is None else rows for name, rows in given.items()}

    def refuse(self, run: Run) -> None:
        """Raises UserError where other sections do not go with these adapters."""
        from lmwright.program.targets import choose, frozen_spec, whole_names

        head = run.model.head_weights(run.model.spec()).keys()
        if run.train.head_gradient == "once" and head.isdisjoint(whole_names(run)):
            raise UserError(
                "train.head_gradient: 'once' has no effect with [lora], whose head is frozen; "
                "leave it out"
            )
        if self.adapters and self.init_from is not None:
            raise UserError(
                "lora.init_from: has no effect beside lora.adapters; set it for each adapter"
            )
        names = [adapter.name for adapter in self.listed]
        if len(names) > 1:
            _refuse_several(run)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"lora.adapters: two have the name {twice!r}; rename one")
        if self.whole:
            _refuse_whole(run, len(names))
        choose(run.model, frozen_spec(run), self.targets)
        self.rows_of(run.train.global_batch_size)


def _refuse_several(run: Run) -> None:
    if run.objective.whole_batch:
        raise UserError(
            f"lora.adapters: objective.kind = {run.objective.kind!r} compares all texts of a "
            "batch, which several adapters would share; train one at a time"
        )
    if run.train.skip_spikes == "rollback":
        raise UserError(
            'train.skip_spikes: "rollback" goes back with all adapters, of which each may spike on '
            'its own; use "skip", or train one at a time'
        )


def _refuse_whole(run: Run, num_adapters: int) -> None:
    for found, why in (
        (num_adapters > 1, "is for one adapter; several share what is not in the layers"),
        (run.objective.forward_passes, "changes the base, with which the objective compares"),
        (run.qat is not None, "has no effect on what [qat] rounds; train all weights there"),
    ):
        if found:
            raise UserError(f"lora.whole: {why}; leave it out")


KINDS = {"lora": LowRank}
"""Kinds of training beside a frozen base."""
