"""Around: the ids that a tokenizer's own file puts before a text, after it, and between two."""

from collections.abc import Sequence

from lmwright.data.tokens.tokenizer import TextTokenizer

Ids = tuple[int, ...]


def ids_around(tokenizer: TextTokenizer) -> tuple[Ids, Ids]:
    """Ids that the tokenizer's own file puts before a text, and after it."""
    bare = tokenizer.unpadded.encode("a", add_special_tokens=False).ids
    full = tokenizer.unpadded.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def ids_between(
    tokenizer: TextTokenizer, before: Sequence[int], after: Sequence[int],
    otherwise: Sequence[int] | None = None,
) -> Ids:  # fmt: skip
    """Ids between two texts of one document that begins with `before` and ends with `after`: those
    of the tokenizer's own file (`[SEP]` of BERT's, two `</s>` of RoBERTa's) where it begins and
    ends texts so, too, else those given, or the end of the first and the beginning of the
    second."""
    plain = (*after, *before) if otherwise is None else tuple(otherwise)
    if ids_around(tokenizer) != (tuple(before), tuple(after)):
        return plain
    bare = tokenizer.unpadded.encode("a", add_special_tokens=False).ids
    pair = tokenizer.unpadded.encode("a", "a", add_special_tokens=True).ids
    start = [*before, *bare]
    end = [*bare, *after]
    if pair[: len(start)] != start or pair[len(pair) - len(end) :] != end:
        return plain
    return tuple(pair[len(start) : len(pair) - len(end)])
