"""Kinds of rows that a source may hold: their parts, what data of them is to an objective
(`Objective.learns_from`, `TokenStore.holds`), and which objectives learn from that."""

from collections.abc import Collection
from typing import Any

from lmwright.errors import UserError

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
TEXTS, PAIRS_OF_ANSWERS, RATED_ANSWERS = "texts", "pairs of answers", "rated answers"
HELD_AS: dict[str, tuple[str, ...]] = {
    LABELED: HAVE_LABELS,
    RELATED: (RELATED_TEXTS,),
    TAGGED: (TAGGED_WORDS,),
    ANSWERED: (ANSWERED_QUESTIONS,),
    "preference": (PAIRS_OF_ANSWERS,),
    "rated": (RATED_ANSWERS,),
}
"""Words for what prepared rows may be, by their kind; all other kinds are texts."""
LEARNED_BY: dict[str, tuple[str, ...]] = {
    TEXTS: ("clm", "sft", "distill", "mlm", "rtd", "diffusion"),
    "labeled texts": ("classify",),
    "texts with a number": ("regress",),
    ANY_LABELS: ("multilabel",),
    SCORED_PAIRS: ("similarity",),
    RELATED_TEXTS: ("embed",),
    TAGGED_WORDS: ("tag",),
    ANSWERED_QUESTIONS: ("answer",),
    PAIRS_OF_ANSWERS: ("dpo", "orpo"),
    RATED_ANSWERS: ("kto",),
}
"""Kinds of objectives by what they learn from."""
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
    "preference": (("chosen", "rejected"), ("prompt", "system", "tools"), ()),
    "rated": (("completion", "label"), ("prompt", "system", "tools"), ()),
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


def refuse_rows(objective: Any, held: Collection[str], there: str) -> None:
    """Raises UserError for an objective that learns from nothing that is `held`; `there` says what
    that is, and where."""
    wanted = objective.learns_from
    if wanted in held:
        return
    kinds = " or ".join(repr(kind) for words in held for kind in LEARNED_BY[words])
    rows = [kind for kind, words in HELD_AS.items() if wanted in words]
    other = f', or sources of rows = "{rows[0]}"' if rows else ""
    raise UserError(
        f"{there}, which objective.kind = {objective.kind!r} cannot train on; choose {kinds}{other}"
    )


def refuse_sources(run: Any) -> None:
    """Raises UserError where the objective learns from none of what the sources hold. Not for every
    run that is read: one may train on a store that other sources made."""
    for rows in sorted({source.rows for source in run.data.sources}):
        there = f'data.sources.rows: are "{rows}"'
        refuse_rows(run.objective, HELD_AS.get(rows, (TEXTS,)), there)
