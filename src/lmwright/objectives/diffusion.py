"""Masked diffusion (https://arxiv.org/abs/2502.09992, https://arxiv.org/abs/2406.07524): any share
of a row's tokens is hidden, and the model predicts them from all others.

    t of each row, spread evenly over the batch --> k = 1 ... n of its n tokens are masked
    loss of the row = n / k times the cross-entropy at the masks, summed

On average over t and over which k tokens are masked, this bounds the negative log likelihood of
the row from above (LLaDA, equation 6): that of its tokens in a random order. Tokens that are not
learned, as those of a prompt, are never masked; nor is the first one of a document, which is given
as in the prediction of next tokens. The masks of a row count n / k each, n in all, so that the
loss is a mean over tokens whatever was drawn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Fraction, NonNegative, NonNegativeInt, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree, walk
from lmwright.core.sharding import constrain
from lmwright.errors import UserError
from lmwright.objectives.clm import loss_at
from lmwright.objectives.mask_draws import (
    Draws,
    draw,
    mask_rows,
    most_masks,
    parts_of,
    pick,
    rows_together,
    spread_of,
)
from lmwright.objectives.masking import keys_of_rows, known_or_any, mask_token_of


@section
class Diffusion(Objective):
    """Masked diffusion, of texts or of answers."""

    kind: Literal["diffusion"] = "diffusion"
    mask_token_id: NonNegativeInt | None = None
    """Id that stands for a hidden token; that of the tokenizer's mask token if unset."""
    eval_samples: PositiveInt = 4
    """Times that a held-out row is masked anew, with another share of its tokens each time."""
    short_rows: Fraction = 0.0
    """Share of rows that are cut to a random length, for texts that are shorter; 0.01 in LLaDA."""
    end_tokens: NonNegativeInt = 0
    """Most end tokens that are learned behind the last text of a row, where it has room and the
    text ends there: without them an answer fills all masks that it is given."""
    end_token_id: NonNegativeInt | None = None
    """Id that ends a text; that of the tokenizer if unset."""
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting."""

    both_ways: ClassVar[bool] = True
    fills_masks: ClassVar[bool] = True
    reads_tokenizer: ClassVar[bool] = True
    sums_head_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.end_token_id is not None and not self.end_tokens:
            raise UserError(
                "objective.end_token_id: has no effect without objective.end_tokens; set how many, "
                "or leave it out"
            )

    def with_tokenizer(self, tokenizer: Any) -> "Diffusion":
        """The objective with the tokenizer's ids. Raises UserError where there is no mask token, or
        no end token that `end_tokens` needs."""
        mask, end = mask_token_of(tokenizer, self.mask_token_id), self.end_token_id
        if not self.end_tokens:
            return replace(self, mask_token_id=mask)
        end = tokenizer.eos_id if end is None else end
        if end is None:
            raise UserError(
                "objective.end_tokens: the tokenizer has no token that ends a text; set "
                "objective.end_token_id, or leave end_tokens out"
            )
        return replace(self, mask_token_id=mask, end_token_id=end)

    @property
    def draws_noise(self) -> bool:
        """True: which tokens are masked is drawn."""
        return True

    def draws(self, key: Array, numbers: Array, count: int, progress: Array | float = 0.0) -> Draws:
        """A key for each row, and its time: one row's in each of `count` equal parts of [0, 1)."""
        for_rows, for_parts = jax.random.split(key)
        parts = parts_of(numbers, count, jax.random.randint(for_parts, (), 0, count))
        spread = spread_of(len(numbers), count)
        return draw(super().draws(for_rows, numbers, count), parts, count, spread)

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the model, whose head is of use at the masks alone, half of all tokens."""
        work = model.work(seq_len)
        head = (path for path, _ in walk(model.head_weights(work.spec)))
        return {"": replace(work, active={**work.active, **dict.fromkeys(head, 0.5)})}

    def for_eval(self) -> "Diffusion":
        """The objective on held-out rows: the same tokens are masked whenever they are measured."""
        return _HeldOut(**vars(self) | {"short_rows": 0.0})

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over the masks, as said above."""
        mask = known_or_any(self.mask_token_id, model.vocab_size)
        batch = self.cut(batch, key)
        masks = mask_rows(batch, key)
        seen = replace(batch, tokens=jnp.where(masks.masked, mask, batch.tokens))
        x, aux = model.hidden(w, seen, compute)
        x = at_own_places(model, x, batch.positions)
        together = rows_together(len(x), key.spread)
        most = most_masks(together, x.shape[1])
        picked = [x, batch.tokens, masks.weights]
        if together > 1:
            picked = pick(masks.masked, together, most, *picked)
            compute = _in_longer_rows(compute, together, most)
        x, tokens, weights = picked
        x = constrain(x, "batch seq embed")
        return loss_at(model, w, x, aux, tokens, weights, compute, z_loss=self.z_loss)

    def cut(self, batch: Batch, draws: Draws) -> Batch:
        """The rows with end tokens behind, and a share of them cut short."""
        at = jnp.arange(batch.tokens.shape[1])
        if self.end_tokens:
            last = jnp.sum(batch.segment_ids > 0, axis=1, keepdims=True) - 1  # padding is behind
            pick = lambda a: jnp.take_along_axis(a, jnp.maximum(last, 0), axis=1)  # noqa: E731
            behind = (at > last) & (at <= last + self.end_tokens)
            behind &= (last >= 0) & (pick(batch.tokens) == self.end_token_id)
            batch = Batch(
                jnp.where(behind, pick(batch.tokens), batch.tokens),
                jnp.where(behind, pick(batch.segment_ids), batch.segment_ids),
                jnp.where(behind, pick(batch.positions) + at - last, batch.positions),
                jnp.where(behind, 1.0, batch.loss_weight),
            )
        if self.short_rows:
            draw = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (2,))  # noqa: E731
            which, length = jnp.split(jax.vmap(draw)(draws.keys), 2, axis=1)  # [B, 1] each
            kept = (which >= self.short_rows) | (at <= length * len(at))
            ids, weight = batch.segment_ids * kept, batch.loss_weight * kept
            batch = replace(batch, segment_ids=ids, loss_weight=weight)
        return batch


def at_own_places(model: Any, x: Array, positions: Array) -> Array:
    """Outputs [B, T, D] where the tokens are that they predict. The first token of a segment has
    none before it, and is read at its own place, as Dream reads it."""
    if model.predicts == "own":
        return x
    return jnp.where((positions > 0)[..., None], jnp.roll(x, 1, axis=1), x)


def _in_longer_rows(compute: Compute, together: int, length: int) -> Compute:
    """Settings for rows that are several ones together, of this length: as many logits exist at
    once, in equal chunks."""
    chunks = -(-length // (compute.loss_chunk_tokens * together))
    return replace(compute, loss_chunk_tokens=-(-length // chunks))


class _HeldOut(Diffusion):
    """As held-out rows are measured: the mean over several masks of each."""

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over the tokens; what is drawn for a row follows from its tokens alone."""
        keys, num = keys_of_rows(batch), self.eval_samples

        def once(sample: Array) -> Loss:
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, sample)
            return Diffusion.loss(self, model, w, batch, draw(own, sample, num), compute)

        losses = jax.lax.map(once, jnp.arange(num))
        return jax.tree.map(lambda sums: jnp.mean(sums, axis=0), losses)
