"""Preferences: the chosen one of two answers to a prompt is made more likely than the other.

A row holds whole pairs, one after the other (docs/conversations.md):

    segment   1 chosen | 2 rejected | 3 chosen | 4 rejected | padding

DPO (https://arxiv.org/abs/2305.18290) compares with a reference, which is the same base with its
adapters off, so that there is no second copy. ORPO (https://arxiv.org/abs/2403.07691) needs none.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from pydantic import Field

from lmwright.config.run import Positive, Run, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.nn.logps import segment_sums
from lmwright.objectives.answers import (
    Predictions,
    log_ratios,
    predict_answers,
    reference_of,
    refuse_alone,
)
from lmwright.objectives.clm import with_penalties

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class Answers(NamedTuple):
    """Log probability and number of tokens of both answers of each pair, and of both whole
    conversations, float32 [B, P]."""

    chosen: Array
    rejected: Array
    chosen_tokens: Array
    rejected_tokens: Array
    chosen_whole: Array
    chosen_whole_tokens: Array

    @property
    def there(self) -> Array:
        """1 where a row has a pair, else 0."""
        return (self.chosen_tokens * self.rejected_tokens > 0).astype(jnp.float32)


def answers(found: Predictions, ids: Array) -> Answers:
    """The answers in predictions of a batch with these segment ids."""
    logps, learned, whole, _ = found
    sums = [segment_sums(a, ids) for a in (logps * learned, learned, logps * whole, whole)]
    chosen, rejected = _sides(ids)
    total, tokens, all_total, all_tokens = sums
    return Answers(
        total[:, chosen], total[:, rejected], tokens[:, chosen], tokens[:, rejected],
        all_total[:, chosen], all_tokens[:, chosen],
    )  # fmt: skip


def _sides(segment_ids: Array) -> tuple[slice, slice]:
    """Segments that are chosen answers, and those that are rejected ones."""
    pairs = segment_ids.shape[1] // 2
    return slice(1, 2 * pairs, 2), slice(2, 2 * pairs + 1, 2)


@section
class Dpo(Objective):
    """Direct preference optimization; needs adapters, whose base is the reference."""

    kind: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """Strength of the pull towards the reference."""
    loss_kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss: DPO's own; IPO's square (https://arxiv.org/abs/2310.12036), over means of tokens;
    SLiC's hinge (https://arxiv.org/abs/2305.10425)."""
    label_smoothing: Smoothing = 0.0
    """Share of pairs taken to be the wrong way round (sigmoid only; cDPO,
    https://ericmitchell.ai/cdpo.pdf)."""

    learns_from: ClassVar[str] = "pairs of answers"
    held_out_metrics: ClassVar[tuple[str, ...]] = ("reward_accuracy", "reward_margin")

    @property
    def forward_passes(self) -> int:
        """Forward passes of the reference."""
        return 1

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_kind != "sigmoid":
            raise UserError(
                f"objective.label_smoothing: has no effect on loss_kind = {self.loss_kind!r}; "
                f"remove it"
            )

    def refuse(self, run: Run) -> None:
        """Raises UserError for a run without adapters."""
        refuse_alone(run)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's pairs. Raises UserError for weights without adapters."""
        reference = reference_of(w, self.kind)
        found, ids = predict_answers(model, w, batch, compute), batch.segment_ids
        ratios = log_ratios(found, predict_answers(model, reference, batch, compute), ids)
        chosen, rejected = (ratios[:, side] for side in _sides(ids))
        return with_penalties(self.of(answers(found, ids), chosen, rejected), model, found.aux)

    def of(self, policy: Answers, chosen: Array, rejected: Array) -> Loss:
        """The loss of answers, given the log ratios float32 [B, P] of both of each pair."""
        chosen, rejected = self.beta * chosen, self.beta * rejected
        margin = chosen - rejected
        if self.loss_kind == "sigmoid":
            share = self.label_smoothing
            each = -(1 - share) * jax.nn.log_sigmoid(margin) - share * jax.nn.log_sigmoid(-margin)
        elif self.loss_kind == "hinge":
            each = jax.nn.relu(1 - margin)
        else:
            means = chosen / _some(policy.chosen_tokens) - rejected / _some(policy.rejected_tokens)
            each = jnp.square((means - 0.5) / self.beta)
        return _loss(each, policy, chosen, rejected)


@section
class Orpo(Objective):
    """Odds-ratio preference optimization: fine-tuning on the chosen answers and away from the
    rejected ones at once."""

    kind: Literal["orpo"] = "orpo"
    beta: Positive = 0.1
    """Weight of the odds ratio beside the chosen conversation's own loss, a mean over its
    tokens."""

    learns_from: ClassVar[str] = "pairs of answers"
    held_out_metrics: ClassVar[tuple[str, ...]] = ("reward_accuracy", "reward_margin")

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's pairs."""
        found = predict_answers(model, w, batch, compute)
        return with_penalties(self.of(answers(found, batch.segment_ids)), model, found.aux)

    def of(self, policy: Answers) -> Loss:
        """The loss of answers."""
        chosen = policy.chosen / _some(policy.chosen_tokens)
        rejected = policy.rejected / _some(policy.rejected_tokens)
        odds = chosen - rejected - _log_not(chosen) + _log_not(rejected)
        ratio = jnp.where(policy.there > 0, jax.nn.log_sigmoid(odds), 0.0)
        nll = -policy.chosen_whole / _some(policy.chosen_whole_tokens)
        return _loss(nll - self.beta * ratio, policy, self.beta * chosen, self.beta * rejected)


def _some(tokens: Array) -> Array:
    return jnp.maximum(tokens, 1.0)


def _log_not(logp: Array) -> Array:
    """log(1 - exp(logp)); finite where there is no answer, whose logp is 0."""
    # with exp, all digits of an answer that is nearly certain would be lost
    return jnp.log(-jnp.expm1(jnp.minimum(logp, -1e-7)))


def _loss(each: Array, policy: Answers, chosen: Array, rejected: Array) -> Loss:
    there = policy.there
    count = jnp.sum(there)
    total = lambda a: (jnp.sum(lax.stop_gradient(a) * there), count)  # noqa: E731
    right = (chosen > rejected).astype(jnp.float32)
    tokens = policy.chosen_tokens * there
    metrics = {
        # as other objectives' are, of the chosen answers' tokens
        "nll": (jnp.sum(lax.stop_gradient(-policy.chosen) * there), jnp.sum(tokens)),
        "accuracy": (jnp.sum(right * tokens), jnp.sum(tokens)),
        "reward_chosen": total(chosen),
        "reward_rejected": total(rejected),
        "reward_margin": total(chosen - rejected),
        "reward_accuracy": total(right),
    }
    return Loss(jnp.sum(each * there), count, metrics)
