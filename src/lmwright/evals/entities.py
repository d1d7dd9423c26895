"""Entities: the F1 of names that tags in BIO or BIOES spell, as seqeval's default mode counts them.

An entity is a run of words of one type: it begins at "B-" or "S-", at another type, or at a tag of
any other kind after "O"; it ends at "E-" or "S-", too. It is right where its type, its first word
and its last one are. BILOU's "L-" and "U-" are other names of "E-" and "S-".
"""

from collections.abc import Sequence

import numpy as np

BEGINS, ENDS = ("B", "S", "U"), ("E", "S", "L", "U")  # prefixes of tags
PREFIXES = {*BEGINS, *ENDS, "I", "M"}


def entities_of(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of each entity of a text; a tag without a prefix is "O" or
    inside an entity that has that name."""
    found, begin, kind = set(), 0, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        inside = tag != "O"
        if prefix not in PREFIXES:
            prefix, name = "", tag
        name = name or "_"
        goes_on = inside and prefix not in BEGINS and kind == name
        if kind is not None and not goes_on:
            found.add((kind, begin, place - 1))
            kind = None
        if inside and not goes_on:
            begin, kind = place, name
        if inside and prefix in ENDS:
            found.add((name, begin, place))
            kind = None
    return found


def entity_counts(real: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> np.ndarray:
    """Counts of entities over texts, float64 [3]: right, given, and there."""
    counts = np.zeros(3)
    for theirs, ours in zip(map(entities_of, real), map(entities_of, given), strict=True):
        counts += [len(theirs & ours), len(ours), len(theirs)]
    return counts


def f1_of(counts: np.ndarray) -> float:
    """The F1 of counts [3], 0 without any entity."""
    right, given, real = counts
    return float(2 * right / (given + real)) if given + real else 0.0
