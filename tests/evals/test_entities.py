"""F1 of entities, against a table worked out by hand from the rules that seqeval documents."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.evals.entities import entities_of, entity_counts, f1_of
from lmwright.evals.tagged import TagRowTally
from lmwright.objectives.tag import Tag

TABLE = {
    "O B-PER I-PER O": {("PER", 1, 2)},
    "B-PER B-PER": {("PER", 0, 0), ("PER", 1, 1)},
    "I-PER I-PER O": {("PER", 0, 1)},  # begins without B
    "B-PER I-LOC": {("PER", 0, 0), ("LOC", 1, 1)},
    "O I-LOC B-LOC I-LOC": {("LOC", 1, 1), ("LOC", 2, 3)},
    "O O": set(),
    "PER LOC LOC O LOC": {("PER", 0, 0), ("LOC", 1, 2), ("LOC", 4, 4)},  # without prefixes
    "first-name last-name B-first-name": {
        ("first-name", 0, 0),
        ("last-name", 1, 1),
        ("first-name", 2, 2),
    },
    "B I O B": {("_", 0, 1), ("_", 3, 3)},  # of one type
    "B-first-name I-first-name": {("first-name", 0, 1)},
    "B-PER E-PER S-PER S-PER": {("PER", 0, 1), ("PER", 2, 2), ("PER", 3, 3)},
    "B-PER I-PER L-PER U-PER O U-LOC": {("PER", 0, 2), ("PER", 3, 3), ("LOC", 5, 5)},
}


@pytest.mark.parametrize("tags", TABLE)
def test_entities(tags):
    assert entities_of(tags.split()) == TABLE[tags]


def test_the_example_of_seqeval():
    """Its README: F1 is 0.50."""
    real = ["O O O B-MISC I-MISC I-MISC O", "B-PER I-PER O"]
    given = ["O O B-MISC I-MISC I-MISC I-MISC O", "B-PER I-PER O"]
    counts = entity_counts([t.split() for t in real], [t.split() for t in given])
    assert counts.tolist() == [1, 2, 2] and f1_of(counts) == 0.5
    assert f1_of(entity_counts([["O"]], [["O"]])) == 0


@pytest.mark.parametrize("scheme", ["BI", "BIES"])
def test_random_tags_have_the_f1_of_seqeval(scheme):
    """Sequences that break the rules of the scheme among them."""
    metrics = pytest.importorskip("seqeval.metrics", reason="pip install seqeval")
    rng = np.random.default_rng(3)
    tags = np.array(["O", "I-MISC", *(f"{each}-{name}" for each in scheme for name in "XY")])
    for _ in range(200):
        sizes = rng.integers(1, 15, 5)
        real = [tags[rng.integers(0, len(tags), size)].tolist() for size in sizes]
        given = [
            [tag if rng.random() < 0.7 else str(rng.choice(tags)) for tag in text] for text in real
        ]
        ours = f1_of(entity_counts(real, given))
        assert ours == pytest.approx(metrics.f1_score(real, given, zero_division=0), abs=1e-12)


def test_a_tally_counts_the_words_of_each_document_of_a_row():
    """Entities do not reach from one document into the next; the last one counts, too."""
    tags = ("O", "B-X", "I-X")
    # (document, or 0 where no word begins; the tag, the one given) of each token
    rows = [
        [(1, 1, 1), (0, 0, 0), (1, 2, 2), (2, 2, 2), (2, 0, 0), (3, 1, 0), (0, 2, 2), (3, 0, 1)],
        [(1, 1, 1), (1, 2, 0), (0, 0, 0), (2, 1, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
    ]
    found = np.array([[(real, given, at) for at, real, given in row] for row in rows])
    tally = TagRowTally(Tag(labels=tags))
    for _ in range(2):
        sums = {"nll": (3.0, 10.0), "accuracy": (7.0, 10.0), "tags": (jnp.asarray(found), 10)}
        tally.add({}, sums)
    documents = [[(1, 1), (2, 2)], [(2, 2), (0, 0)], [(1, 0), (0, 1)], [(1, 1), (2, 0)], [(1, 1)]]
    names = [[[tags[pair[i]] for pair in each] for each in documents] for i in (0, 1)]
    metrics = pytest.importorskip("seqeval.metrics", reason="pip install seqeval")
    loss = tally.loss("x")
    assert loss.entities.tolist() == [6, 10, 10]
    assert loss.entity_f1 == pytest.approx(metrics.f1_score(*names))
    assert (loss.accuracy, loss.loss, loss.tokens) == (0.7, 0.3, 20)
