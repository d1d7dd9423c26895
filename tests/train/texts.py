"""Texts of a dozen words, for runs that are trained in a test."""

import itertools
import json

import numpy as np

WORDS = "the cat sat on a mat while one dog ran far away".split()
ROWS = 90


def sentences():
    """The same ones each time, without an end."""
    dice = np.random.default_rng(3)
    while True:
        yield " ".join(dice.choice(WORDS, 9))


def write_texts(path):
    """A jsonl file of texts."""
    rows = ({"text": text} for text in itertools.islice(sentences(), ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
