"""Exact match and F1 of answers, by the rules of SQuAD's evaluation script
(https://arxiv.org/abs/1606.05250, and 1806.03822 for questions without an answer).

Answers are compared in lower case, without punctuation, articles and extra whitespace, with the
best-matching right answer.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def plain(answer: str) -> str:
    """An answer as it is compared."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def scores_of(given: str, right: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1) of an answer, the best over the right ones. Right answers of which nothing
    is left do not count; if there is no other, the right answer is an empty one."""
    right = [answer for answer in right if plain(answer)] or [""]
    found = [(float(plain(given) == plain(each)), _f1(given, each)) for each in right]
    exact, f1 = zip(*found, strict=True)
    return max(exact), max(f1)


def _f1(given: str, right: str) -> float:
    ours, theirs = plain(given).split(), plain(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs))
