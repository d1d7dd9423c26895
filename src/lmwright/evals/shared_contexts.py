"""Log-likelihoods of several continuations of one context, which the model reads once.

    beginning [1, S] --> cache                                 read once for many contexts
    a row: its copy | rest of a context [T] | continuation 1 | continuation 2 | ...  [P]

Each continuation sees the context and itself. A row without a common beginning reads its context by
the platform's kernel. This takes a cache of keys and values alone; other models read whole rows
(`evals.likelihood`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.copies import num_copies_of, on_each, stacked
from lmwright.core.param import Tree
from lmwright.evals.decoding import rounded_tokens, turns_with_length
from lmwright.evals.loss import compiled
from lmwright.evals.prefixes import Ids, common_prefixes
from lmwright.evals.prompt_rows import pad_left, pad_prompts
from lmwright.models import cached
from lmwright.models.decoder import Decoder

SHORTEST = 16  # tokens of a context that are worth a cache
CACHED_TOKENS = 16_384  # of the rows in a batch
MOST_ROWS = 64
MOST_LOGITS = 2**27  # of a batch, in numbers

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, at least one, and of what follows it, at least one."""
Group = tuple[Ids, list[tuple[int, Ids]]]
"""A context, and its continuations with their numbers."""


@dataclass(frozen=True)
class Shared:
    """Contexts with a common beginning."""

    prefix: int
    """Its tokens; 0 where there is none."""
    groups: list[Group]
    """Longest context first."""


def shares(model: Decoder) -> bool:
    """True if a model's cache has keys and values alone, and rotations do not depend on the length
    of a row."""
    kinds = {kind.kind for span in model.spans for kind in span.kinds}
    states = [model.state(k, batch_size=1, length=7, dtype=jnp.float32) for k in kinds]
    return all(a.shape[1] == 7 for a in jax.tree.leaves(states)) and not turns_with_length(model)


def shared_of(model: Decoder, pairs: Sequence[Pair]) -> list[Shared]:
    """The contexts that begin alike, and those with several continuations that do not all differ in
    the last token alone; none for a model that cannot share."""
    if not shares(model):
        return []
    by_context: dict[Ids, list[tuple[int, Ids]]] = {}
    for number, (context, continuation) in enumerate(pairs):
        by_context.setdefault(tuple(context), []).append((number, tuple(continuation)))
    fitting = [
        context
        for context, continuations in by_context.items()
        if len(context) + max(len(ids) for _, ids in continuations) <= model.seq_len
    ]
    shared = []
    for prefix, contexts in common_prefixes(fitting):
        groups = [
            (context, by_context[context])
            for context in sorted(contexts, key=len, reverse=True)
            if prefix or _gains(context, by_context[context])
        ]
        if groups:
            shared.append(Shared(prefix, groups))
    return shared


def _gains(context: Ids, own: list[tuple[int, Ids]]) -> bool:
    return len(context) >= SHORTEST and len({ids[:-1] for _, ids in own}) > 1


def score_shared(
    model: Decoder, w: Tree, shared: Sequence[Shared], compute: Compute
) -> Iterator[tuple[list[int], list[float], list[bool]]]:
    """(numbers, their log-likelihoods, whether greedy decoding says the same), batch by batch."""
    read, score = _programs(model, compute)
    copies = num_copies_of(w)
    for each in shared:
        prefix = None
        if each.prefix:
            beginning = pad_prompts([list(each.groups[0][0][: each.prefix])])
            prefix = read(w, *stacked([beginning] * copies))
        for groups in _batches(each, model, compute, copies):
            shape = _shape(groups, each.prefix, compute, copies)
            parts = [groups[device::copies] for device in range(copies)]
            rows = stacked([_rows(part, each.prefix, shape) for part in parts])
            found = jax.device_get(score(w, prefix, *rows))
            for device, part in enumerate(parts):
                yield _sums(part, *(a[device] for a in found))


def rounded_rows(count: int) -> int:
    """Rows of a padded batch: a power of two up to 8, then a multiple of 8."""
    return -(-count // 8) * 8 if count > 8 else 1 << (count - 1).bit_length()


def _batches(
    shared: Shared, model: Decoder, compute: Compute, copies: int
) -> Iterator[Sequence[Group]]:
    start, groups = 0, shared.groups
    while start < len(groups):
        width = rounded_tokens(len(groups[start][0]), compute)
        size = longest = 0
        for _, own in groups[start : start + MOST_ROWS * copies]:
            most = max(longest, sum(len(ids) for _, ids in own))
            rows = -(-(size + 1) // copies)
            full = rows * (width + most) > CACHED_TOKENS
            if size and (full or rows * most * model.vocab_size > MOST_LOGITS):
                break
            size, longest = size + 1, most
        if start + size < len(groups) and (each := size // copies):
            # no padding, and the shape of the next batches
            size = copies * (each // 8 * 8 or 1 << (each.bit_length() - 1))
        yield groups[start : start + size]
        start += size


def _shape(
    groups: Sequence[Group], prefix: int, compute: Compute, copies: int
) -> tuple[int, int, int, int]:
    """(B, T, C, P) of the part of each device, as `_rows` has them."""
    width = rounded_tokens(max(len(context) for context, _ in groups) - prefix, compute)
    most = max(len(own) for _, own in groups)
    inner = max(sum(len(ids) - 1 for _, ids in own) for _, own in groups)
    num_rows = rounded_rows(-(-len(groups) // copies))
    return num_rows, width, 1 << (most - 1).bit_length(), inner and rounded_tokens(inner, compute)


def _rows(
    groups: Sequence[Group], prefix: int, shape: tuple[int, int, int, int]
) -> tuple[np.ndarray, ...]:
    """Arrays of B contexts with up to C continuations of P tokens together: the contexts [B, T],
    where they are, the first tokens of continuations [B, C]; the tokens of the continuations but
    the last of each [B, P], where they are, their continuations, positions, and the tokens behind
    them."""
    num_rows, width, most, inner = shape
    trunk, valid = pad_left([context[prefix:] for context, _ in groups], num_rows, width)
    firsts = np.zeros((num_rows, most), np.int32)
    tokens, of, positions, targets = (np.zeros((num_rows, inner), np.int32) for _ in range(4))
    for row, branch, (_, ids), place in _places(groups):
        firsts[row, branch] = ids[0]
        tokens[row, place], targets[row, place], of[row, place] = ids[:-1], ids[1:], branch + 1
        positions[row, place] = len(groups[row][0]) + np.arange(len(ids) - 1)
    return trunk, valid, firsts, tokens, of > 0, of, positions, targets


def _places(groups: Sequence[Group]) -> Iterator[tuple[int, int, tuple[int, Ids], slice]]:
    """(row, its number there, itself, the places of its tokens but the first) of continuations."""
    for row, (_, own) in enumerate(groups):
        at = 0
        for branch, each in enumerate(own):
            yield row, branch, each, slice(at, at := at + len(each[1]) - 1)


def _sums(
    groups: Sequence[Group], first: np.ndarray, first_same: np.ndarray, rest: np.ndarray,
    rest_same: np.ndarray,
) -> tuple[list[int], list[float], list[bool]]:  # fmt: skip
    """The numbers of continuations, the sums of what their tokens have, and whether all are the
    most likely."""
    numbers, sums, same = [], [], []
    for row, branch, (number, _), place in _places(groups):
        numbers.append(number)
        sums.append(float(first[row, branch] + rest[row, place].sum()))
        same.append(bool(first_same[row, branch] and rest_same[row, place].all()))
    return numbers, sums, same


@lru_cache(maxsize=8)
def _programs(model: Decoder, compute: Compute) -> tuple[Callable[..., Tree], Callable[..., Tree]]:
    """The reading of a common beginning [1, S] into a cache, and the log-probabilities of rows as
    `_rows` makes them: of first tokens [B, C] and of those behind others [B, P], each with whether
    it has the highest logit."""

    def read(w: Tree, tokens: Array, valid: Array) -> Tree:
        cache = cached.new_cache(model, 1, tokens.shape[1], compute)
        return cached.extend(model, w, tokens, valid, cache, compute, empty_cache=True)[1]

    def score(
        w: Tree, prefix: Tree | None, trunk: Array, valid: Array, firsts: Array, tokens: Array,
        real: Array, of: Array, positions: Array, targets: Array,
    ) -> tuple[Array, ...]:  # fmt: skip
        num_rows, width = trunk.shape
        behind = width + tokens.shape[1]
        branches = cached.Branches(of, positions)
        if prefix is None:
            cache = cached.new_cache(model, num_rows, behind, compute)
            hidden, cache = cached.extend(model, w, trunk, valid, cache, compute, empty_cache=True)
            last, more = hidden[:, -1:], hidden[:, :0]
            if tokens.shape[1]:
                more, _ = cached.extend(model, w, tokens, real, cache, compute, branches=branches)
        else:
            cache = _copies(model, prefix, num_rows, behind, compute)
            own = cached.cache_positions(valid, cache)
            branches = cached.Branches(
                jnp.concatenate([jnp.zeros_like(trunk), of], axis=1),
                jnp.concatenate([own, positions], axis=1),
            )
            tokens = jnp.concatenate([trunk, tokens], axis=1)
            real = jnp.concatenate([valid, real], axis=1)
            hidden, _ = cached.extend(model, w, tokens, real, cache, compute, branches=branches)
            last, more = hidden[:, width - 1 : width], hidden[:, width:]
        first = _scores(model.logits(w, last), firsts[:, None])
        rest = _scores(model.logits(w, more), targets[..., None])
        return *(a[:, 0] for a in first), *(a[..., 0] for a in rest)

    return compiled(on_each(read), compute), compiled(on_each(score), compute)


def _copies(model: Decoder, prefix: Tree, num_rows: int, behind: int, compute: Compute) -> Tree:
    """A cache of rows that go on from one beginning, with room for `behind` tokens."""
    length = prefix["valid"].shape[1]
    cache = cached.new_cache(model, num_rows, length + behind, compute)

    def put(full: Array, one: Array) -> Array:  # [L, B, S, ...] and [L, 1, S, ...]
        return full.at[:, :, :length].set(one)

    return {
        "layers": jax.tree.map(put, cache["layers"], prefix["layers"]),
        "valid": cache["valid"].at[:, :length].set(prefix["valid"]),
        "filled": prefix["filled"],
    }


def _scores(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Log-probabilities of targets [B, P, C] by logits [B, P, V], and whether they are highest."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets, axis=2)
    greedy = jnp.argmax(logits, axis=2, keepdims=True) == targets
    return chosen - jax.nn.logsumexp(logits, axis=2, keepdims=True), greedy
