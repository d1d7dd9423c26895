"""Log-likelihoods of continuations, many at once.

    (context, continuation) --equal but for the last token: one row--> rows, longest first
      --batches of few shapes--> logits where a continuation is predicted --> sums, was it greedy

Logits exist where they are needed alone: [B, P, V] of P tokens of a continuation, not [B, T, V].
Contexts that begin alike, and several longer continuations of one, go another way
(`evals.shared_contexts`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.copies import num_copies_of, on_each, stacked
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.evals.compute import refuse_encoder
from lmwright.evals.decoding import rounded_tokens
from lmwright.evals.loss import compiled
from lmwright.evals.shared_contexts import (
    MOST_LOGITS,
    Pair,
    rounded_rows,
    score_shared,
    shared_of,
)
from lmwright.models.decoder import Decoder

BATCH_TOKENS = 8192


@dataclass
class _Row:
    """A row that the model reads, and who asked for it."""

    ids: tuple[int, ...]
    num: int
    """Tokens of a continuation, which the last ones of the row predict."""
    asked: list[tuple[int, int]]
    """Number of a pair, and its last token; all others of its continuation are in the row."""


def log_likelihoods(
    model: Decoder,
    w: Tree,
    pairs: Sequence[Pair],
    compute: Compute,
    on_done: Callable[[int], None] | None = None,
) -> list[tuple[float, bool]]:
    """For each pair the sum of the log-probabilities of its continuation in nats, and whether
    greedy decoding would write it. A context that is too long loses its beginning.

    `on_done(n)` is called whenever n more pairs are done. Raises UserError for an encoder, for a
    continuation longer than the model's context and for ids that the model does not have."""
    refuse_encoder(model)
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    _refuse_bad(model, pairs)
    shared = shared_of(model, pairs)
    in_shared = set()
    for context in shared:
        for _, continuations in context.groups:
            in_shared |= {number for number, _ in continuations}
    rest = _score_rows(model, w, _rows(model, pairs, in_shared), compute)
    for numbers, sums, greedy in chain(score_shared(model, w, shared, compute), rest):
        for number, total, same in zip(numbers, sums, greedy, strict=True):
            results[number] = total, same
        if on_done:
            on_done(len(numbers))
    return results


def _score_rows(
    model: Decoder, w: Tree, rows: list[_Row], compute: Compute
) -> Iterator[tuple[list[int], list[float], list[bool]]]:
    """(numbers, their log-likelihoods, whether greedy decoding writes them), batch by batch."""
    score, copies = _scores(model, compute), num_copies_of(w)
    for batch, shape in _batches(rows, model, compute, copies):
        parts = [batch[device::copies] for device in range(copies)]
        num = rounded_rows(max(sum(len(row.asked) for row in part) for part in parts))
        arrays = stacked([_arrays(part, shape, num, model.seq_len - 1) for part in parts])
        for part, sums, greedy in zip(parts, *jax.device_get(score(w, *arrays)), strict=True):
            numbers = [number for row in part for number, _ in row.asked]
            count = len(numbers)
            yield numbers, sums[:count].tolist(), greedy[:count].tolist()


def _refuse_bad(model: Decoder, pairs: Sequence[Pair]) -> None:
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise UserError(
                f"pair {number + 1}: a context and a continuation need at least one token each"
            )
        if len(continuation) > model.seq_len:
            raise UserError(
                f"pair {number + 1}: a continuation of {len(continuation)} tokens is longer than "
                f"the model's context of {model.seq_len}; shorten it"
            )
        whole = (*context, *continuation)
        if max(whole) >= model.vocab_size or min(whole) < 0:
            raise UserError(
                f"pair {number + 1}: holds id {max(whole)}, the model has {model.vocab_size}; use "
                "the tokenizer that the model was trained with"
            )


def _rows(model: Decoder, pairs: Sequence[Pair], others: Collection[int]) -> list[_Row]:
    """The rows of all pairs but `others`, longest first."""
    rows: dict[tuple[tuple[int, ...], int], _Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        if number in others:
            continue
        whole = (*context, *continuation)[-(model.seq_len + 1) :]
        key = whole[:-1], len(continuation)
        rows.setdefault(key, _Row(*key, [])).asked.append((number, whole[-1]))
    return sorted(rows.values(), key=lambda row: (-len(row.ids), row.num))


def _batches(
    rows: list[_Row], model: Decoder, compute: Compute, copies: int
) -> Iterator[tuple[list[_Row], tuple[int, int, int]]]:
    """Batches of rows for all devices, with the number of rows of each, their tokens and the tokens
    of a continuation."""
    start = 0
    while start < len(rows):
        width = rounded_tokens(len(rows[start].ids), compute)
        size, many = 0, 1
        for row in rows[start:]:
            longest = max(many, 1 << (row.num - 1).bit_length())
            count = -(-(size + 1) // copies)
            if count > 1 and (
                count * width > BATCH_TOKENS or count * longest * model.vocab_size > MOST_LOGITS
            ):
                break
            size, many = size + 1, longest
        count = rounded_rows(-(-size // copies))
        yield rows[start : start + size], (count, width, min(many, width))
        start += size


def _arrays(
    rows: list[_Row], shape: tuple[int, int, int], num: int, last_position: int
) -> tuple[Batch, np.ndarray, ...]:
    """The batch [B, T]; places [B, P] in it that predict; and of `num` (R) pairs the row [R], the
    targets [R, P], the last ones, and where they are real."""
    count, width, most = shape
    tokens, segments = (np.zeros((count, width), np.int32) for _ in range(2))
    at = np.zeros((count, most), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.ids)] = row.ids
        segments[i, : len(row.ids)] = 1
        at[i, most - row.num :] = np.arange(len(row.ids) - row.num, len(row.ids))
    of, targets, real = (
        np.zeros(num, np.int32),
        np.zeros((num, most), np.int32),
        np.zeros((num, most), bool),
    )
    pair = 0
    for i, row in enumerate(rows):
        for _, last in row.asked:
            of[pair] = i
            targets[pair, most - row.num :] = (*row.ids[len(row.ids) - row.num + 1 :], last)
            real[pair, most - row.num :] = True
            pair += 1
    places = np.minimum(np.arange(width, dtype=np.int32), last_position)
    positions = np.broadcast_to(places, tokens.shape)
    batch = Batch(tokens, segments, positions, np.zeros(tokens.shape, np.float32))
    return batch, at, of, targets, real


@lru_cache(maxsize=8)
def _scores(model: Decoder, compute: Compute) -> Callable[..., Any]:
    """Sums [R] of log-probabilities of the real ones among targets [R, P], which rows `of` [R]
    predict at places `at` [B, P], and whether each has the highest logit."""

    def scores(
        w: Tree, batch: Batch, at: Array, of: Array, targets: Array, real: Array
    ) -> tuple[Array, Array]:
        hidden, _ = model.hidden(w, batch, compute)
        hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)  # [B, P, D]
        logits = model.logits(w, hidden).astype(jnp.float32)
        place = of[:, None], jnp.arange(targets.shape[1])
        chosen = logits[(*place, targets)] - jax.nn.logsumexp(logits, axis=-1)[place]
        greedy = jnp.argmax(logits, axis=-1)[place] == targets
        return jnp.sum(jnp.where(real, chosen, 0), axis=1), jnp.all(greedy | ~real, axis=1)

    return compiled(on_each(scores), compute)
