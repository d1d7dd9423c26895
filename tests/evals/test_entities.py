"""F1 of entities, against a table worked out by hand from the rules that seqeval documents."""

import pytest

from lmwright.evals.entities import entities_of, entity_counts, f1_of

TABLE = {
    "O B-PER I-PER O": {("PER", 1, 2)},
    "B-PER B-PER": {("PER", 0, 0), ("PER", 1, 1)},
    "I-PER I-PER O": {("PER", 0, 1)},  # begins without B
    "B-PER I-LOC": {("PER", 0, 0), ("LOC", 1, 1)},
    "O I-LOC B-LOC I-LOC": {("LOC", 1, 1), ("LOC", 2, 3)},
    "O O": set(),
    "B-first-name I-first-name": {("first-name", 0, 1)},
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
