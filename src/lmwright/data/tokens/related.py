"""Groups: the tokens of related texts, which share a row and do not see each other.

    anchor, positive, negatives --each with its ends, cut--> ids and marks of one group

A mark begins each text; the first token of the anchor is marked as learned, which tells groups
apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmwright.config.rows import TOKENS_PER_TEXT
from lmwright.data.text.chat_encode import BEGINS, LEARNED
from lmwright.errors import UserError
from lmwright.guard.terminal import visible


class Group(NamedTuple):
    """Related texts as they are written."""

    ids: np.ndarray
    marks: np.ndarray
    """uint8 for each id."""
    texts: int
    cut: bool
    """True if texts were cut, or negatives left out, to fit in a row."""


def paired(texts: Sequence[np.ndarray], source: str, row: str) -> Sequence[np.ndarray]:
    """The two texts of a row. Raises UserError where there is one alone."""
    if len(texts) != 2:
        raise UserError(
            f"{visible(source, lines=False)}: {visible(row, lines=False)} has no second text; give "
            "it in a column text_pair (columns.text_pair), or leave the row out"
        )
    return texts


def fit_group(
    texts: Sequence[np.ndarray], before: Sequence[int], after: Sequence[int], seq_len: int
) -> Group | None:
    """Texts as one group of at most `seq_len` tokens: of those that do not fit, the longest are cut
    to one length. None where no token stands for the anchor, or for what belongs to it."""
    ends = len(before) + len(after)
    if any(not len(text) + ends for text in texts[:2]):
        return None
    there = [text for text in texts if len(text) + ends]
    most = max(2, seq_len // max(TOKENS_PER_TEXT, ends + 1))  # each with a token of its own
    cut, there = len(there) > most, there[:most]
    sizes = [len(text) for text in there]
    kept = _cut(sizes, max(0, seq_len - ends * len(there)))
    pieces = [[*before, *text[:size], *after] for text, size in zip(there, kept, strict=True)]
    starts = np.cumsum([0, *map(len, pieces[:-1])])
    marks = np.zeros(sum(map(len, pieces)), np.uint8)
    marks[starts] = BEGINS
    marks[0] |= LEARNED
    ids = np.concatenate([np.asarray(piece, texts[0].dtype) for piece in pieces])
    return Group(ids, marks, len(pieces), cut or kept != sizes)


def _cut(sizes: Sequence[int], room: int) -> list[int]:
    """Sizes of which the largest are lowered to one size, so that they fit."""
    left, kept = room, list(sizes)
    for count, place in zip(
        range(len(sizes), 0, -1), np.argsort(sizes, kind="stable"), strict=True
    ):
        kept[place] = min(sizes[place], left // count)
        left -= kept[place]
    return kept
