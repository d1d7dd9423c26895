"""Lengths of documents that are wanted, and of examples, to choose rows that are long enough."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

from lmwright.config.run import Source
from lmwright.data.manifest import Manifest, add_counts
from lmwright.guard.terminal import visible

KEPT = 0.95
LOST = 0.10
"""Of a source, before it is worth a warning."""
STEP = 64
"""Lengths of rows are multiples of it."""


def wanted_lengths(named: Sequence[tuple[str, Source]]) -> dict[str, tuple[int | None, int | None]]:
    """Fewest and most tokens of a document, of the sources that say so."""
    return {
        name: (source.min_tokens, source.max_tokens)
        for name, source in named
        if source.min_tokens or source.max_tokens
    }


def bucket(tokens: int) -> str:
    """Histogram key of a length: the length rounded up by at most 3 %."""
    step = 1 << max(0, tokens.bit_length() - 6)
    return str(-(-tokens // step) * step)


def long_enough(histogram: Mapping[str, int]) -> int:
    """Length of the shortest row, in STEPs, that holds KEPT of the examples."""
    sizes = sorted(int(size) for size in histogram)
    totals = accumulate(histogram[str(size)] for size in sizes)
    wanted = KEPT * sum(histogram.values())
    enough = next(size for size, count in zip(sizes, totals, strict=True) if count >= wanted)
    return -(-enough // STEP) * STEP


def cure(histogram: Mapping[str, int]) -> str:
    """Suggestion of a row length that keeps most of the examples, as part of a sentence."""
    return (
        f"data.pack.seq_len = {long_enough(histogram)} (and model.seq_len no shorter) keeps "
        f"{KEPT:.0%} of them"
    )


def histogram_of(counts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Lengths of all examples of several parts, splits and sources together."""
    splits = [split for part in counts for split in part.get("lengths", {}).values()]
    return reduce(add_counts, (lengths for split in splits for lengths in split.values()), {})


def why_empty(tokenized: Manifest) -> str:
    """Why tokenized data holds no tokens, and the cure."""
    splits = tokenized.counts.get("sources", {}).values()
    other = sum(count.get("other_length", 0) for split in splits for count in split.values())
    return none_left(other)


def none_left(other: int) -> str:
    """Why no text is left, of which `other` have other lengths than their source wants."""
    if not other:
        return "the corpus is empty; add text"
    return (
        f"all {other:,} documents are shorter than min_tokens or longer than max_tokens of their "
        "source in data.sources; change these, or add text"
    )


def warnings(tokenized: Manifest) -> list[str]:
    """One sentence for each source that lost more than LOST of its examples to short rows."""
    sentences = []
    sources = tokenized.counts["sources"]
    for name in dict.fromkeys(name for split in sources.values() for name in split):
        counts = [split[name] for split in sources.values() if name in split]
        lost = sum(count.get("too_long", 0) for count in counts)
        examples = lost + sum(count["docs"] for count in counts)
        if lost <= LOST * examples:
            continue
        lengths = [split.get(name, {}) for split in tokenized.counts.get("lengths", {}).values()]
        histogram = reduce(add_counts, lengths, {})
        row = tokenized.fingerprint["fingerprint"]["conversations"]["seq_len"]
        what = (
            f"{visible(name, lines=False)}: {lost:,} of {examples:,} examples "
            f"({lost / examples:.0%}) are longer than a row of {row} tokens and were left out"
        )
        # a stage that an earlier version began did not count
        known = sum(histogram.values()) == examples
        sentences.append(f"{what}; {cure(histogram)}" if known else what)
    return sentences
