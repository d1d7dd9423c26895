"""Log-likelihoods of several continuations of one context, which the model reads once.

    contexts [B, T] --prefill--> cache --a copy of its context's for each continuation--> [R, S]
                                   |        continuations [R, P] --> logits where they are predicted
                                   +--> logits of all first tokens

A cache of keys and values alone can be copied and extended by several tokens at once; other models
read whole rows (`evals.likelihood`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.evals.generate import bucket, pad_prompts
from lmwright.evals.loss import compiled
from lmwright.models import cached
from lmwright.models.decoder import Decoder

SHORTEST = 16  # tokens of a context that are worth a cache
CACHED_TOKENS = 8192  # of the copies in a batch
MOST_LOGITS = 2**27  # of a batch, in numbers

Group = tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]
"""A context, and its continuations with their numbers."""


def shares(model: Decoder) -> bool:
    """True if a model's cache has keys and values alone, and rotations do not depend on the length
    of a row."""
    kinds = {kind.kind for span in model.spans for kind in span.kinds}
    states = [model.state(k, batch_size=1, length=7, dtype=jnp.float32) for k in kinds]
    scaling = getattr(model, "rope_scaling", None)
    return all(a.shape[1] == 7 for a in jax.tree.leaves(states)) and (
        scaling is None or scaling.kind not in ("dynamic", "longrope")
    )


def groups_of(model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Group]:
    """The contexts with several continuations that do not all differ in the last token alone,
    longest first; none for a model that cannot share."""
    if not shares(model):
        return []
    found: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for number, (context, continuation) in enumerate(pairs):
        found.setdefault(tuple(context), []).append((number, tuple(continuation)))
    groups = [
        (context, own)
        for context, own in found.items()
        if len(context) >= SHORTEST
        and len({ids[:-1] for _, ids in own}) > 1
        and len(context) + max(len(ids) for _, ids in own) <= model.seq_len
    ]
    return sorted(groups, key=lambda group: -len(group[0]))


def score_groups(
    model: Decoder, w: Tree, groups: Sequence[Group], compute: Compute
) -> Iterator[tuple[list[int], Array, Array]]:
    """(numbers, their log-likelihoods, whether greedy decoding says the same), batch by batch."""
    score = _scores(model, compute)
    for batch in _batches(groups, model):
        contexts, valid = pad_prompts([list(context) for context, _ in batch])
        asked = [(i, *one) for i, (_, own) in enumerate(batch) for one in own]
        count = 1 << (len(asked) - 1).bit_length()
        most = 1 << (max(len(ids) for _, _, ids in asked) - 1).bit_length()
        of = np.zeros(count, np.int32)
        targets, real = np.zeros((count, most), np.int32), np.zeros((count, most), bool)
        for row, (i, _, ids) in enumerate(asked):
            of[row], targets[row, : len(ids)], real[row, : len(ids)] = i, ids, True
        sums, greedy = jax.device_get(score(w, contexts, valid, of, targets, real))
        yield [number for _, number, _ in asked], sums, greedy


def _batches(groups: Sequence[Group], model: Decoder) -> Iterator[Sequence[Group]]:
    start = 0
    while start < len(groups):
        size = rows = most = 0
        for _, own in groups[start:]:
            more, longest = rows + len(own), max(most, *(len(ids) for _, ids in own))
            tokens = more * (bucket(len(groups[start][0])) + longest)
            if size and (tokens > CACHED_TOKENS or more * longest * model.vocab_size > MOST_LOGITS):
                break
            size, rows, most = size + 1, more, longest
        yield groups[start : start + size]
        start += size


@lru_cache(maxsize=8)
def _scores(model: Decoder, compute: Compute) -> Callable[..., Any]:
    """Sums [R] of log-probabilities of the real ones among targets [R, P] behind the contexts `of`
    [R] among tokens [B, T], and whether each has the highest logit."""

    def scores(
        w: Tree, tokens: Array, valid: Array, of: Array, targets: Array, real: Array
    ) -> tuple[Array, Array]:
        cache = cached.new_cache(model, len(tokens), tokens.shape[1] + targets.shape[1], compute)
        hidden, cache = cached.extend(model, w, tokens, valid, cache, compute, empty_cache=True)
        hidden = hidden[:, -1:][of]
        if targets.shape[1] > 1:
            layers = jax.tree.map(lambda a: a[:, of], cache["layers"])  # [L, B, S, ...]
            copies = cache | {"layers": layers, "valid": cache["valid"][of]}
            more, _ = cached.extend(model, w, targets[:, :-1], real[:, 1:], copies, compute)
            hidden = jnp.concatenate([hidden, more], axis=1)  # [R, P, D]
        logits = model.logits(w, hidden).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=2)[..., 0]
        chosen = chosen - jax.nn.logsumexp(logits, axis=-1)
        greedy = jnp.argmax(logits, axis=-1) == targets
        return jnp.sum(jnp.where(real, chosen, 0), axis=1), jnp.all(greedy | ~real, axis=1)

    return compiled(scores, compute)
