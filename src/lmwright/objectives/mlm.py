"""Masked language modeling (https://arxiv.org/abs/1810.04805): some tokens are hidden, and an
encoder predicts them from both sides.

    tokens --hide--> tokens with masks --encoder--> x [B, T, D] --pick--> [B, K, D] --head--> loss

Each row hides the same share of its tokens, so that the head runs over K places of each row and
never over the others. Which tokens are hidden follows from the key of a row alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from lmwright.config.run import NonNegative, NonNegativeInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree, walk
from lmwright.core.sharding import constrain
from lmwright.data.tokens.words import ALONE, word_pieces
from lmwright.errors import UserError
from lmwright.objectives.clm import loss_at
from lmwright.objectives.masking import (
    keys_of_rows,
    known_or_any,
    mask_token_of,
    ordered,
    starts_of_words,
)
from lmwright.objectives.ramp import Ramp, Share, count_of, ends, now

SHARES = ("mask_ratio", "random_share", "kept_share")  # which may move during a run


@section
class Mlm(Objective):
    """Prediction of masked tokens."""

    kind: Literal["mlm"] = "mlm"
    mask_token_id: NonNegativeInt | None = None
    """Id that stands for a hidden token; that of the tokenizer's mask token if unset."""
    mask_ratio: Annotated[float, Field(gt=0, le=1)] | Ramp = 0.3
    """Share of a row's tokens that are predicted: a number, or a table with `start` and `end`."""
    random_share: Share | Ramp = 0.0
    """Share of these that become a random token instead of the mask; 0.1 in BERT."""
    kept_share: Share | Ramp = 0.0
    """Share of these that stay as they are; 0.1 in BERT."""
    unit: Literal["token", "word"] = "token"
    """Tokens are hidden one by one, or the pieces of a word together."""
    never_masked: tuple[NonNegativeInt, ...] | None = None
    """Ids of tokens that are not predicted; the tokenizer's special tokens if unset."""
    eval_mask_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share in held-out rows; `mask_ratio` if unset, at its end."""
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting."""

    both_ways: ClassVar[bool] = True
    reads_tokenizer: ClassVar[bool] = True
    sums_head_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in SHARES:
            if isinstance(share := getattr(self, name), Ramp):
                share.refuse(f"objective.{name}")
        if not all(ends(self.mask_ratio)):
            raise UserError("objective.mask_ratio: at 0 nothing is predicted; use more")
        for random, kept in _meetings(self.random_share, self.kept_share):
            if random + kept > 1:
                raise UserError(
                    f"objective.kept_share: {kept:g} and objective.random_share = {random:g} are "
                    "more than all masked tokens; lower one"
                )

    def with_tokenizer(self, tokenizer: Any) -> "Mlm":
        """The objective with the ids that it leaves open. Raises UserError for a tokenizer without
        a mask token, or of another id."""
        mask = mask_token_of(tokenizer, self.mask_token_id)
        special = tokenizer.special_tokens.values()
        never = tuple(sorted(special)) if self.never_masked is None else self.never_masked
        known = vars(self) | {"mask_token_id": mask, "never_masked": never}
        if self.unit == "token":
            return Mlm(**known)
        return _ByWords(**known | {"pieces": word_pieces(tokenizer)})

    @property
    def draws_noise(self) -> bool:
        """True: which tokens are hidden is drawn."""
        return True

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the model, whose head runs over the masked tokens alone."""
        work = model.work(seq_len)
        head = (path for path, _ in walk(model.head_weights(work.spec)))
        share = self.num_places(seq_len) / seq_len
        return {"": replace(work, active={**work.active, **dict.fromkeys(head, share)})}

    def for_eval(self) -> "Mlm":
        """The objective on held-out rows: the same tokens are hidden whenever they are measured."""
        return _HeldOut(**self._settings_at_the_end())

    def _settings_at_the_end(self) -> dict[str, Any]:
        shares = {name: ends(getattr(self, name))[1] for name in SHARES}
        shares["mask_ratio"] = self.eval_mask_ratio or shares["mask_ratio"]
        return vars(self) | shares

    def num_places(self, seq_len: int) -> int:
        """The most tokens of a row that are predicted."""
        return min(seq_len, math.ceil(max(ends(self.mask_ratio)) * seq_len))

    def draws(self, key: Array, numbers: Array, count: int, progress: Array | float = 0.0) -> Any:
        """A key [B] for each row, with the progress of the run if shares follow it."""
        keys = super().draws(key, numbers, count)
        moves = any(isinstance(getattr(self, name), Ramp) for name in SHARES)
        return RowKeys(keys, progress) if moves else keys

    def keys(self, batch: Batch, key: Any) -> Any:
        """A key [B] for each row, or RowKeys, as `draws` returned them."""
        return key

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over the hidden tokens; `key`, as `draws` returns it, says which they are."""
        hidden = self.hide(batch, model.vocab_size, self.keys(batch, key))
        x, aux = model.hidden(w, replace(batch, tokens=hidden.tokens), compute)
        x, targets = constrain(hidden.pick(x), "batch seq embed"), hidden.pick(batch.tokens)
        weights = hidden.pick(batch.loss_weight) * hidden.predicted
        return loss_at(model, w, x, aux, targets, weights, compute, z_loss=self.z_loss)

    def hide(self, batch: Batch, vocab_size: int, keys: Any) -> "Hidden":
        """The rows with some tokens hidden, by a key [B] for each, or by RowKeys."""
        keys, done = keys if isinstance(keys, RowKeys) else RowKeys(keys)
        mask = known_or_any(self.mask_token_id, vocab_size)
        special = jnp.asarray(np.isin(np.arange(vocab_size), self.never_masked or ()))
        candidates = (batch.segment_ids > 0) & (batch.loss_weight > 0) & ~special[batch.tokens]
        count = jnp.sum(candidates, axis=1, keepdims=True)  # [B, 1]
        wanted = count_of(self.mask_ratio, done, count)
        wanted = jnp.minimum(jnp.maximum(wanted, 1), count)
        draws = jax.vmap(lambda key: _draw(key, batch.tokens.shape[1], vocab_size))(keys)
        order, rank = ordered(candidates, self.turns(batch, vocab_size, draws.order))
        masked = rank < wanted
        other = jnp.where(draws.fate < now(self.random_share, done), draws.token, mask)
        kept = draws.fate >= 1 - now(self.kept_share, done)
        tokens = jnp.where(masked & ~kept, other, batch.tokens)
        places = order[:, : self.num_places(batch.tokens.shape[1])]
        predicted = jnp.arange(places.shape[1]) < wanted
        return Hidden(tokens, places, predicted.astype(jnp.float32))

    def turns(self, batch: Batch, vocab_size: int, uniform: Array) -> Array:
        """Sort keys [B, T]: the tokens with the smallest are masked. Of whole words, all pieces
        take the key of the word's first piece in `uniform` [B, T]."""
        if self.unit == "token":
            return uniform
        codes = np.full(vocab_size, ALONE, np.uint8)
        codes[: len(self.codes)] = np.frombuffer(self.codes, np.uint8)
        return jnp.take_along_axis(uniform, starts_of_words(batch, jnp.asarray(codes)), axis=1)

    @property
    def codes(self) -> bytes:
        """A byte for each id, which says where words begin; none is known without a tokenizer."""
        return b""


class RowKeys(NamedTuple):
    """Randomness of the rows of a batch, and the time in a run."""

    keys: Array  # [B]
    progress: Array | float = 0.0  # share of the run's steps that is done, in [0, 1)


class Hidden(NamedTuple):
    """Rows with hidden tokens, and K positions of each at which tokens are predicted."""

    tokens: Array  # int32 [B, T]
    places: Array  # int32 [B, K]
    predicted: Array  # float32 [B, K]: 1 for a hidden token, 0 for a place that is left over

    def pick(self, a: Array) -> Array:
        """An array [B, T, ...] at these positions, [B, K, ...]."""
        places = self.places.reshape(*self.places.shape, *[1] * (a.ndim - 2))
        return jnp.take_along_axis(a, places, axis=1)


class _TokenDraws(NamedTuple):
    """Random numbers for each token of a row."""

    order: Array  # uniform in [0, 1): the smallest are hidden
    fate: Array  # uniform in [0, 1): what stands for it
    token: Array  # any id


def _draw(key: Array, length: int, vocab_size: int) -> _TokenDraws:
    first, second, third = jax.random.split(key, 3)
    uniform = jax.random.uniform
    token = jax.random.randint(third, (length,), 0, vocab_size)
    return _TokenDraws(uniform(first, (length,)), uniform(second, (length,)), token)


def _meetings(random: float | Ramp, kept: float | Ramp) -> list[tuple[float, float]]:
    """Pairs of values that two shares may have at once: at both ends if they move together, else
    the largest."""
    times = [(s.after, s.until) for s in (random, kept) if isinstance(s, Ramp)]
    if len(times) == 2 and times[0] == times[1]:
        return list(zip(ends(random), ends(kept), strict=True))
    return [(max(ends(random)), max(ends(kept)))]


class _HeldOut(Mlm):
    """`Mlm` as measured on held-out rows: the key of a row follows from its tokens."""

    def keys(self, batch: Batch, key: Array) -> Array:
        """A key [B] for each row, from its tokens alone."""
        return keys_of_rows(batch)


@dataclass(frozen=True, kw_only=True)
class _ByWords(Mlm):
    """`Mlm` with the words of its tokenizer."""

    pieces: bytes = field(repr=False)

    @property
    def codes(self) -> bytes:
        """A byte for each id, which says where words begin."""
        return self.pieces

    def for_eval(self) -> "_ByWords":
        """The objective on held-out rows: the same words are hidden whenever they are measured."""
        return _HeldOutByWords(**self._settings_at_the_end())


class _HeldOutByWords(_HeldOut, _ByWords):
    """`Mlm` as measured on held-out rows, with the words of a tokenizer."""
