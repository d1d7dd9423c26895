"""Tags: the numbers of the tags of words beside the tokens of their text.

    words --joined by spaces--> text --offsets of the tokenizer--> the first token of each word

A text that is longer than a row is cut at its end, by whole words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lmwright.data.tokens.classes import Classes
from lmwright.data.tokens.tokenizer import TextTokenizer

ENDING = ".tags.bin"
DTYPE = "<u2"  # 0, or the number of a tag plus 1


@dataclass(frozen=True)
class Tags(Classes):
    """The tags of a run, and the tokens of a row, to which longer texts are cut."""

    unit: ClassVar[str] = "word"
    called: ClassVar[str] = "tag"
    left_out: ClassVar[str] = " or leave it out"


class Words(NamedTuple):
    """Words as tokens."""

    ids: np.ndarray
    """uint32 [tokens]"""
    first: np.ndarray
    """int64 [words that are there]: the place of each word's first token."""
    word: np.ndarray
    """int64, the same: its number among the words."""
    cut: bool
    """Words at a side were left out."""


def words_as_tokens(
    tokenizer: TextTokenizer, words: Sequence[str], room: int, *, side: str = "right"
) -> Words:
    """The tokens of the words, cut at a side to at most `room` and to whole words. A word is
    missing if no token begins in it, since it shares one with the word before it."""
    encoding = tokenizer.plain.encode(" ".join(words), add_special_tokens=False)
    ids = np.array(encoding.ids, np.uint32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    stop = np.cumsum([len(word) + 1 for word in words]) - 1
    # a token that begins with the space before a word, or is that space, is the word's
    owner = np.searchsorted(stop, offsets[:, 0], side="right")
    owner = np.minimum(owner, len(words) - 1)
    cut = len(ids) > room
    if cut and side == "left":
        start = int(np.searchsorted(owner, owner[-room - 1], side="right"))
        ids, owner = ids[start:], owner[start:]
    elif cut:
        end = min(room, int(np.argmax(owner == owner[room])))
        ids, owner = ids[:end], owner[:end]
    there, first = np.unique(owner, return_index=True)
    return Words(ids, first, there, cut)


class TagColumn:
    """The tags beside one token file."""

    per_token: ClassVar[bool] = True

    def __init__(self, tags: Tags, source: str):
        self.tags, self.source = tags, source
        self.seen: Counter[int] = Counter()
        self.cut = self.lost = 0

    def beside(
        self,
        tokenizer: TextTokenizer,
        words: Sequence[str],
        tags: Sequence[str],
        id_: str,
        around: tuple[Sequence[int], Sequence[int]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, tags uint16) of the tokens of words, with what is `around` a text; both empty where
        no word fits. Raises UserError for a tag that is none of the run's."""
        numbers = np.array([self.tags.number(tag, self.source, id_) for tag in tags])
        before, after = around
        room = max(0, self.tags.seq_len - len(before) - len(after))
        found = words_as_tokens(tokenizer, words, room)
        self.cut += found.cut
        self.lost += len(words) - len(found.word)
        if not len(found.word):
            return np.zeros(0, np.uint32), np.zeros(0, DTYPE)
        self.seen.update(numbers[found.word].tolist())
        ids = np.concatenate([np.array(before, np.uint32), found.ids, np.array(after, np.uint32)])
        beside = np.zeros(len(ids), DTYPE)
        beside[len(before) + found.first] = numbers[found.word] + 1
        return ids, beside

    def counts(self) -> dict[str, Any]:
        """Counts of the texts that were cut, of words without a tag for that or for sharing a
        token, and of the words with each tag."""
        names = {self.tags.labels[number]: count for number, count in self.seen.items()}
        return {"cut": self.cut, "words_left_out": self.lost, "classes": names}
