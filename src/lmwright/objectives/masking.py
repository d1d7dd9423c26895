"""Hidden tokens: the mask token, and the order in which the tokens of a row are hidden."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.contract import Batch
from lmwright.data.tokens.words import BEGINS, JOINT, SAME
from lmwright.errors import UserError

MASK = "<|mask|>"


def mask_token_of(tokenizer: Any, wanted: int | None) -> int:
    """Id of the mask token: the tokenizer's own, else the `wanted` one of its special tokens.
    Raises UserError for a tokenizer without a mask token, or of another id."""
    known: int | None = tokenizer.mask_id
    if known is None and (wanted is None or wanted not in tokenizer.special_tokens.values()):
        raise UserError(
            f"objective.mask_token_id: the tokenizer has no mask token; prepare with '{MASK}' "
            "among data.tokenizer.special_tokens, or add one to a model by: "
            f"lmwright vocab MODEL OUT --special --add '{MASK}'"
        )
    if known is not None and wanted not in (None, known):
        raise UserError(
            f"objective.mask_token_id: {wanted} is not the id of the tokenizer's mask token "
            f"{tokenizer.mask!r}; leave it out, or set {known}"
        )
    return next(each for each in (known, wanted) if each is not None)


def known_or_any(mask_token_id: int | None, vocab_size: int) -> int:
    """Id that stands for hidden tokens. Without a tokenizer, as in a plan, it is unknown, and any
    id gives the same program."""
    return vocab_size - 1 if mask_token_id is None else mask_token_id


def ordered(candidates: Array, uniform: Array) -> tuple[Array, Array]:
    """Places of each row int32 [B, T] in the order in which they are hidden, candidates first, and
    the rank of each place in it; `uniform` [B, T] are draws in [0, 1)."""
    order = jnp.argsort(jnp.where(candidates, uniform, 2.0), axis=1)
    return order, jnp.argsort(order, axis=1)


def starts_of_words(batch: Batch, codes: Array) -> Array:
    """Place int32 [B, T] of the first token of each token's word, by the code uint8 [V] of each id
    (`data.tokens.words`). Words end where their document does."""
    own = codes[batch.tokens].astype(jnp.int32)
    left, right, places = own >> 1 & 7, own >> 4, jnp.arange(own.shape[1])
    known = jax.lax.cummax(jnp.where(right != SAME, places, 0), axis=1)
    before = jnp.roll(jnp.take_along_axis(right, known, axis=1), 1, axis=1)
    meet = (left != before) & (left != SAME) & (before != JOINT)
    other = batch.segment_ids != jnp.roll(batch.segment_ids, 1, axis=1)
    return jax.lax.cummax(jnp.where((own & BEGINS > 0) | meet | other, places, 0), axis=1)


def keys_of_rows(batch: Batch) -> Array:
    """A key [B] for each row that follows from its tokens alone, so that a held-out row is measured
    in one way."""
    places = jnp.arange(1, batch.tokens.shape[1] + 1, dtype=jnp.uint32)
    sums = jnp.sum(batch.tokens.astype(jnp.uint32) * places, axis=1)  # any hash, modulo 2^32
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.key(0), number))(sums)
