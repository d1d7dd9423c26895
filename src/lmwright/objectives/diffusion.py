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
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Run,
    section,
    seq_len_of,
)
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree, walk
from lmwright.core.sharding import constrain, context_ways
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.nn.intervals import Interval, own_block
from lmwright.objectives.clm import loss_at
from lmwright.objectives.mask_draws import (
    Draws,
    Masks,
    complementary,
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
    """Share of rows that are cut to a random length, so that the model learns shorter texts; 0.01
    in LLaDA."""
    end_tokens: NonNegativeInt = 0
    """Most end tokens that are learned after the last text of a row, where it has room and the text
    ends there: without them an answer fills all masks that it is given."""
    end_token_id: NonNegativeInt | None = None
    """Id that ends a text; that of the tokenizer if unset."""
    block_tokens: PositiveInt | None = None
    """Tokens of a block: blocks are learned one after the other, each from those before it without
    masks (https://arxiv.org/abs/2503.09573); if unset, a row is one block."""
    views: Literal["one", "complementary"] = "one"
    """`complementary` sees each row twice, and masks each token in one of the two."""
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

    def refuse(self, run: Run) -> None:
        """Raises UserError for blocks that are no shorter than a row."""
        self.works(run.model, seq_len_of(run))

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the model, whose head is of use at the masks alone: half of all tokens, or
        each once in two views. Raises UserError for blocks that are no shorter than a row."""
        work = model.work(seq_len)
        head = {path for path, _ in walk(model.head_weights(work.spec))}
        share = 0.5 if self.views == "one" else 1.0
        if self.block_tokens is not None and self.block_tokens >= seq_len:
            raise UserError(
                f"objective.block_tokens: {self.block_tokens} is not below the {seq_len} tokens of "
                "a row; leave it out, or use fewer"
            )
        times = self.num_rows
        matrices = {path: work.active.get(path, 1.0) for path, p in walk(work.spec) if p.is_matrix}
        active = {path: share if path in head else times * a for path, a in matrices.items()}
        work = replace(work, active={**work.active, **active})
        if times > 1 and work.attention is not None:
            windows, ways = work.attention.windows * times, self.block_tokens is None
            attention = replace(work.attention, windows=windows, both_ways=ways)
            work = replace(work, attention=attention)
        uncut = ("context", "stage") if self.block_tokens else ()
        return {"": replace(work, uncut=(*work.uncut, *uncut))}

    @property
    def num_views(self) -> int:
        """Rows with masks for each row of a batch."""
        return 1 if self.views == "one" else 2

    @property
    def num_rows(self) -> int:
        """Rows that the model sees for each row of a batch."""
        return self.num_views + (self.block_tokens is not None)

    def for_eval(self) -> "Diffusion":
        """The objective on held-out rows: the same tokens are masked whenever they are measured."""
        return _HeldOut(**vars(self) | {"short_rows": 0.0, "views": "one"})

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over the masks, as described for the module."""
        batch = self.cut(batch, key)
        block = self.blocks(batch)
        views: tuple[Masks, ...] = (mask_rows(batch, key, block),)
        if self.views == "complementary":
            views = complementary(batch, views[0], block)
        masked, weights = (jnp.stack(arrays, 1) for arrays in zip(*views, strict=True))
        x, aux = self.hidden(model, w, batch, masked, compute)  # [B, views, T, D]
        tokens = jnp.broadcast_to(batch.tokens[:, None], masked.shape)
        together, most = self.places(batch, key)
        picked = [a.reshape(-1, *a.shape[2:]) for a in (masked, x, tokens, weights)]
        if together > 1:
            picked[1:] = pick(picked[0], together, most, *picked[1:])
            compute = _in_longer_rows(compute, together, most)
        _, x, tokens, weights = picked
        x = constrain(x, "batch seq embed")
        return loss_at(model, w, x, aux, tokens, weights, compute, z_loss=self.z_loss)

    def blocks(self, batch: Batch) -> Interval | None:
        """The block of each token, as the tokens in it; None where a row is one block."""
        if self.block_tokens is None:
            return None
        return own_block(batch.segment_ids, self.block_tokens)

    def places(self, batch: Batch, draws: Draws) -> tuple[int, int]:
        """Rows whose masks are picked together, and how many masks they have at most."""
        num_rows, length = batch.tokens.shape
        if self.num_views == 2:
            return (2, length) if context_ways() == 1 else (1, length)
        together = 1 if self.block_tokens else rows_together(num_rows, draws.spread)
        return together, most_masks(together, length)

    def hidden(
        self, model: Any, w: Tree, batch: Batch, masked: Array, compute: Compute
    ) -> tuple[Array, Any]:
        """The residual stream [B, views, T, D] of rows with masks, bool [B, views, T], where the
        tokens are that it predicts; and what the layers return beside it."""
        mask, views = known_or_any(self.mask_token_id, model.vocab_size), self.num_views
        tokens = jnp.where(masked, mask, batch.tokens[:, None])
        hidden = model.hidden
        if self.block_tokens is not None:
            tokens = jnp.concatenate([tokens, batch.tokens[:, None]], axis=1)
            kernel = select.attention_of_blocks(compute, self.block_tokens, views)
            hidden = partial(model.hidden_by, kernel)
        again = lambda a: jnp.repeat(a, self.num_rows, axis=0)  # noqa: E731
        rows = jax.tree.map(again, batch)
        rows = replace(rows, tokens=tokens.reshape(-1, tokens.shape[2]))
        x, aux = hidden(w, rows, compute)
        x = at_own_places(model, x, rows.positions)
        return x.reshape(-1, self.num_rows, *x.shape[1:])[:, :views], aux

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
    """Settings for rows of `length` that join `together` rows: as many logits exist at once, in
    equal chunks."""
    chunks = -(-length // (compute.loss_chunk_tokens * together))
    return replace(compute, loss_chunk_tokens=-(-length // chunks))


class _HeldOut(Diffusion):
    """`Diffusion` as measured on held-out rows: the mean over several masks of each."""

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over the tokens; what is drawn for a row follows from its tokens alone."""
        keys, num = keys_of_rows(batch), self.eval_samples

        def once(sample: Array) -> Loss:
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, sample)
            return Diffusion.loss(self, model, w, batch, draw(own, sample, num), compute)

        losses = jax.lax.map(once, jnp.arange(num))
        return jax.tree.map(lambda sums: jnp.mean(sums, axis=0), losses)
