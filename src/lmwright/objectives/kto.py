"""KTO: answers of which each was liked or not, without a second one to compare with.

https://arxiv.org/abs/2402.01306. The reward of an answer is measured from a reference point, how
far the model has moved from its base on answers that do not belong to their prompts. Such
answers are made of the row itself, each conversation taking the answer of the one before it:

    row       prompt 1, answer 1 | prompt 2, answer 2 | prompt 3, answer 3
    rotated   prompt 1, answer 3 | prompt 2, answer 1 | prompt 3, answer 2
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.run import Positive, Run, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective
from lmwright.core.param import Tree
from lmwright.core.pipeline import microbatches, num_stages
from lmwright.nn.logps import segment_sums
from lmwright.objectives.answers import log_ratios, predict_answers, reference_of, refuse_alone
from lmwright.objectives.clm import with_penalties


@section
class Kto(Objective):
    """Kahneman-Tversky optimization; needs adapters, whose base is the reference."""

    kind: Literal["kto"] = "kto"
    beta: Positive = 0.1
    """Strength of the pull towards the reference."""
    loss_kind: Literal["kto", "apo-zero-unpaired"] = "kto"
    """The loss: KTO's own, or APO's (https://arxiv.org/abs/2408.06266), whose reference point is
    0."""
    desirable_weight: Positive = 1.0
    """Weight of answers that were liked."""
    undesirable_weight: Positive = 1.0
    """Weight of answers that were not."""

    learns_from: ClassVar[str] = "rated answers"
    held_out_metrics: ClassVar[tuple[str, ...]] = ("reward_chosen", "reward_rejected")

    @property
    def forward_passes(self) -> int:
        """Forward passes of the reference, and of both models on mismatched answers for the
        reference point."""
        return 3 if self.loss_kind == "kto" else 1

    @property
    def rows_are_alone(self) -> bool:
        """False where the answers of a microbatch have one reference point."""
        return self.loss_kind != "kto"

    def refuse(self, run: Run) -> None:
        """Raises UserError for a run without adapters."""
        refuse_alone(run)

    def for_eval(self) -> "Kto":
        """The objective on held-out rows, whose batches are no microbatches that a pipeline takes
        together."""
        return _HeldOut(**vars(self))

    def pieces(self, compute: Compute) -> int:
        """Number of microbatches in the rows of a loss, each with a reference point of its own."""
        return compute.num_microbatches if num_stages() > 1 else 1

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's answers; the reference point is the mean of a microbatch. Raises
        UserError for weights without adapters."""
        base = reference_of(w, self.kind)
        found, ids = predict_answers(model, w, batch, compute), batch.segment_ids
        ratio = log_ratios(found, predict_answers(model, base, batch, compute), ids)  # [B, T + 1]
        logps, tokens = (segment_sums(a, ids) for a in (found.logps * found.learned, found.learned))
        there = (tokens > 0).astype(jnp.float32)
        point = jnp.zeros(())
        if self.loss_kind == "kto":
            point = self._point(model, lax.stop_gradient(w), base, batch, compute)
        liked = liked_answers(batch)
        return with_penalties(
            self.of(ratio, liked, there, point, (logps, tokens)), model, found.aux
        )

    def _point(self, model: Model, w: Tree, base: Tree, batch: Batch, compute: Compute) -> Array:
        """Mean log ratio of answers with other prompts in the same microbatch, at least 0, for
        each row [B, 1]. An answer that is alone in its row has no other prompt, and does not
        count."""
        rotated = rotate(batch)
        found, ids = predict_answers(model, w, rotated, compute), rotated.segment_ids
        moved = log_ratios(found, predict_answers(model, base, rotated, compute), ids)
        tokens = segment_sums(found.learned, ids)
        several = jnp.max(rotated.segment_ids, axis=1, keepdims=True) > 1  # [B, 1]
        counted = ((tokens > 0) & several).astype(jnp.float32)
        total = lambda a: jnp.sum(microbatches(a, self.pieces(compute)), (1, 2))  # noqa: E731
        mean = total(moved * counted) / jnp.maximum(total(counted), 1.0)
        return jnp.tile(jnp.maximum(mean, 0.0), len(several) // len(mean))[:, None]

    def of(
        self, ratio: Array, liked: Array, there: Array, point: Array, answers: tuple[Array, Array]
    ) -> Loss:
        """The loss of log ratios float32 [B, S] of answers that are `there`; `answers` is their
        log probability and how many tokens they have."""
        sign = 2 * liked - 1
        weight = liked * self.desirable_weight + (1 - liked) * self.undesirable_weight
        each = weight * jax.nn.sigmoid(-self.beta * sign * (ratio - point))
        reward = lax.stop_gradient(self.beta * ratio)
        logps, tokens = lax.stop_gradient(answers)
        count, good = jnp.sum(there), there * liked
        bad = there - good
        right = (sign * (ratio - point) > 0) * tokens
        metrics = {
            # as other objectives' are, of the liked answers' tokens
            "nll": (-jnp.sum(logps * good), jnp.sum(tokens * good)),
            "accuracy": (jnp.sum(right * there), jnp.sum(tokens * there)),
            "reward_chosen": (jnp.sum(reward * good), jnp.sum(good)),
            "reward_rejected": (jnp.sum(reward * bad), jnp.sum(bad)),
            "reference_point": (jnp.sum(point * there), count),
        }
        return Loss(jnp.sum(each * there), count, metrics)


class _HeldOut(Kto):
    """`Kto` as measured on held-out rows: the reference point is the mean of a batch."""

    def pieces(self, compute: Compute) -> int:
        """One: a batch is a microbatch."""
        return 1


def liked_answers(batch: Batch) -> Array:
    """float32 [B, T + 1]: 1 where the segment's answer was liked."""
    first = (batch.positions == 0) & (batch.segment_ids > 0)
    return segment_sums(batch.loss_weight * first, batch.segment_ids)


def rotate(batch: Batch) -> Batch:
    """Batch with the same prompts, each with the answer of the segment before it; the first gets
    the last one."""
    t = batch.tokens.shape[1]

    def of_row(tokens: Array, ids: Array, positions: Array, weight: Array) -> Batch:
        number = jnp.arange(t + 1)
        size = jnp.bincount(ids, length=t + 1).at[0].set(0)  # padding is behind, and no segment
        learned = (weight > 0) & (positions > 0)
        asked = jnp.full(t + 1, t).at[ids].min(jnp.where(learned, positions, t))
        asked = jnp.minimum(asked, size)  # tokens of each prompt
        last = jnp.max(ids)
        other = jnp.where(number == 1, last, number - 1)  # whose answer comes
        new_size = jnp.where((number > 0) & (number <= last), asked + (size - asked)[other], 0)
        stop = jnp.cumsum(new_size)
        place = jnp.arange(t)
        here = jnp.searchsorted(stop, place, side="right")  # segment of each place
        real = here <= last
        here = jnp.minimum(here, last)
        position = place - (stop - new_size)[here]
        prompt = position < asked[here]
        start = jnp.cumsum(size) - size
        theirs = other[here]
        source = jnp.where(
            prompt,
            start[here] + position,
            start[theirs] + asked[theirs] + position - asked[here],
        )
        source = jnp.clip(source, 0, t - 1)
        return Batch(
            tokens[source],
            jnp.where(real, here, 0),
            jnp.where(real, position, 0),
            jnp.where(real & (~prompt | (position == 0)), weight[source], 0.0),
        )

    return jax.vmap(of_row)(batch.tokens, batch.segment_ids, batch.positions, batch.loss_weight)
