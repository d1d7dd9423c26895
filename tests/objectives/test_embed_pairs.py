"""Which texts an anchor is compared with, by the formula in loops over vectors that are given."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.contract import Batch
from lmwright.objectives.embed import Embed, Texts, marks_of, pairs_of

# by row: names of texts, a group after the other, each of an anchor, its positive, others
ROWS = (
    [("q1", "a1", "n1"), ("q2", "a2", "n2")],
    [("q1", "a3", "n3"), ("q4", "a2", "a5"), ("q5", "a5")],  # an anchor, a positive, a negative
    [("q6", "q5", "n1")],  # that are others', and a positive that is an anchor elsewhere
)
PLACES, DIM = 9, 8


def problem():
    """Texts [3, PLACES], and the unit vector of each name."""
    rng, names = np.random.default_rng(0), sorted({n for row in ROWS for g in row for n in g})
    vectors = dict(zip(names, rng.standard_normal((len(names), DIM)), strict=True))
    found = np.zeros((len(ROWS), PLACES, DIM))
    there, anchor = np.zeros((2, len(ROWS), PLACES), bool)
    marks = np.zeros((len(ROWS), PLACES, 2), np.uint32)
    for r, row in enumerate(ROWS):
        at = 0
        for group in row:
            for i, name in enumerate(group):
                found[r, at], there[r, at], anchor[r, at] = vectors[name], True, i == 0
                marks[r, at] = 7, names.index(name) + 1
                at += 1
    texts = Texts(jnp.asarray(found, jnp.float32), *map(jnp.asarray, (there, anchor, marks)))
    return texts, vectors


def by_loops(vectors, dim, direction, temperature):
    unit = {name: v[:dim] / np.linalg.norm(v[:dim]) for name, v in vectors.items()}
    every = [group for row in ROWS for group in row]
    total = right = 0.0
    for i, (anchor, own, *_) in enumerate(every):
        seen, back = [unit[anchor] @ unit[own]], [unit[anchor] @ unit[own]]
        for k, (other, *rest) in enumerate(every):
            for j, text in enumerate(rest):
                mine = k == i and j == 0
                with_anchor = j == 0 and other == anchor  # what belongs to an equal anchor
                if not mine and not with_anchor and text not in (anchor, own):
                    seen.append(unit[anchor] @ unit[text])
            if k != i and other not in (anchor, own) and rest[0] != own:
                back.append(unit[own] @ unit[other])
        logs = [np.log(np.sum(np.exp((np.array(s) - s[0]) / temperature))) for s in (seen, back)]
        total += np.mean(logs[: 1 + (direction == "both")])
        right += seen[0] > max(seen[1:])
    return total, right


@pytest.mark.parametrize("direction", ["anchors", "both"])
def test_equal_texts_are_no_negatives(direction):
    texts, vectors = problem()
    objective = Embed(direction=direction, temperature=0.2)
    pairs = pairs_of(texts)
    assert int(pairs.there.sum()) == 6
    for dim in (DIM, 3):
        total, right = objective.scored(pairs, dim)
        wanted, hits = by_loops(vectors, dim, direction, 0.2)
        assert float(total) == pytest.approx(wanted, rel=1e-5)
        assert float(right) == hits


def test_marks_are_equal_for_equal_texts_alone():
    """Wherever they stand; not for the same tokens in another order."""
    rows = [[[5, 6, 7], [7, 6, 5], [5, 6]], [[9], [5, 6, 7], [6, 5, 7]]]
    tokens, ids, at = (np.zeros((2, 10), np.int32) for _ in range(3))
    for r, row in enumerate(rows):
        whole = np.concatenate(row)
        tokens[r, : len(whole)] = whole
        ids[r, : len(whole)] = np.repeat(np.arange(len(row)) + 1, list(map(len, row)))
        at[r, : len(whole)] = np.concatenate([np.arange(len(text)) for text in row])
    batch = Batch(*map(jnp.asarray, (tokens, ids, at)), jnp.zeros((2, 10)))
    marks = np.asarray(marks_of(batch, jnp.asarray(ids[:, None] == np.arange(1, 4)[:, None])))
    named = [tuple(mark) for row in marks.tolist() for mark in row]
    texts = [tuple(text) for row in rows for text in row]
    for i, a in enumerate(texts):
        assert [named[i] == other for other in named] == [a == b for b in texts]
