"""Kinds of rows that a source may hold, by their parts."""

LABELED, RELATED, TAGGED, ANSWERED = "labeled", "related", "tagged", "answered"
ANY_LABELS = "texts with any number of labels"
SCORED_PAIRS = "pairs of texts with a number"
HAVE_LABELS = ("labeled texts", "texts with a number", ANY_LABELS, SCORED_PAIRS)
"""Words for what an objective learns from such rows (`Objective.learns_from`)."""
RELATED_TEXTS = "related texts"
"""Name of what a store of related rows holds, and an objective learns from."""
TAGGED_WORDS = "tagged words"
"""Name of what a store of tagged rows holds, and an objective learns from."""
ANSWERED_QUESTIONS = "answered questions"
"""Name of what a store of answered rows holds, and an objective learns from."""
QUESTIONS = "questions.jsonl"
"""File of the held-out questions of a source, with their answers as texts."""
PLAIN = ("text", LABELED, RELATED, TAGGED, ANSWERED)
"""Kinds whose rows are no conversations."""

# kind of a source's rows -> what a row must have, may have, and what its messages consist of
ROW_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "labeled": (("text", "label"), ("text_pair",), ()),
    "related": (("anchor", "positive"), ("negative",), ()),
    "tagged": (("tokens", "tags"), (), ()),
    "answered": (("question", "context", "answers"), (), ()),
    "alpaca": (("instruction", "output"), ("input", "system"), ()),
    "prompt": (("prompt", "completion"), ("system",), ()),
    "messages": (("messages",), ("tools",), ("role", "content")),
    "sharegpt": (("conversations",), ("system", "tools"), ("from", "value")),
    "preference": (("prompt", "chosen", "rejected"), ("system", "tools"), ()),
    "rated": (("prompt", "completion", "label"), ("system", "tools"), ()),
}

CLASSES_PER_TOKEN = 16
"""Classes whose bits stand beside each token of a text that may have any number of them."""


class AnyOf(tuple[str, ...]):
    """Classes of which a text may have any number, as `prepare` takes them."""


class PairNumbers(tuple[str, ...]):
    """No classes, since labels are numbers of pairs of texts apart, as `prepare` takes them."""


MADE: dict[str, type[tuple[str, ...]]] = {ANY_LABELS: AnyOf, SCORED_PAIRS: PairNumbers}
"""Classes as `prepare` takes them, by what an objective learns from."""

TOKENS_PER_TEXT = 8
"""A row of T tokens has places for T / 8 texts that are given vectors: a shorter text takes the
room of so many tokens."""
