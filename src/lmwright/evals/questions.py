"""Questions: the answer to each question of a file in its own context, by an answerer.

(question, context) --windows--> packed rows [B, T] --answerer--> logits --> best span of them all
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lmwright.core.compute import Compute
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.text.answered import answers_of
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.tokens.answers import Context, Windows, document_of, in_windows
from lmwright.errors import UserError
from lmwright.evals.answered import SCORES, AnswerLoss
from lmwright.evals.documents import Columns, Reader, of_tokens
from lmwright.evals.spans import Found, answer_text, flat_windows, found_in
from lmwright.evals.squad import scores_of
from lmwright.evals.tallies import Tally, refuse_threshold
from lmwright.formats.loaded import LoadedModel
from lmwright.models.answerer import Answerer


class Asked(NamedTuple):
    """A context with the tokens of its question and its own."""

    context: str
    tokens: Context


class Answered(NamedTuple):
    """A context and the answers in it."""

    context: str
    found: Found


class Questions(Reader):
    """An answerer, ready for questions with their contexts."""

    text_column: ClassVar[str] = "question"
    pair_column: ClassVar[str | None] = "context"

    def __init__(
        self,
        loaded: LoadedModel,
        compute: Compute,
        columns: Columns,
        threshold: float | None = None,
    ):
        refuse_threshold(threshold)
        super().__init__(loaded)
        self.model: Answerer = loaded.model
        self.weights = loaded.weights
        self.most = self.model.window_tokens
        self.tally = AnswerTally(self.model.no_answer)
        self._run = self.program(partial(self.model.compared, compute=compute))

    def encode(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None
    ) -> tuple[list[Asked], list[bool]]:
        """Questions and their contexts as tokens, and whether a question lost its end."""
        contexts = seconds or [""] * len(texts)
        windows = Windows(self.model.window_tokens, self.model.window_overlap)
        made = in_windows(self.tokenizer, texts, contexts, windows, self.around)
        asked = [Asked(*each) for each in zip(contexts, made, strict=True)]
        return asked, [each.cut for each in made]

    def scores(self, asked: Sequence[Asked]) -> list[Answered]:
        """The likeliest answers to each question."""
        windows = flat_windows([each.tokens for each in asked])
        end = [self.tokenizer.eos_id or 0]  # of a question that no token stands for
        made = [document_of(asked[number].tokens, begin, self.around) for number, begin in windows]
        logits = of_tokens(self._run, [ids or end for ids, _ in made], self.most)
        each: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in asked]
        for (number, begin), (_, head), scores in zip(windows, made, logits, strict=True):
            each[number].append((begin, head, scores))
        most = self.model.max_answer_tokens
        return [
            Answered(one.context, found_in(one.context, one.tokens, mine, most))
            for one, mine in zip(asked, each, strict=True)
        ]

    @classmethod
    def usable(cls, rows: Iterator[Row | Bad], columns: Columns) -> Iterator[Row | Bad]:
        """The rows, of which those without a text in the column of contexts cannot be used."""
        column = str(columns.pair)
        for row in rows:
            if isinstance(row, Row) and not isinstance(json.loads(row.meta).get(column), str):
                yield Bad(
                    row.number, f"no text in {column!r}, where its context is read", id=row.id
                )
            else:
                yield row


class AnswerTally(Tally):
    """Tally of questions that are answered."""

    def __init__(self, no_answer: str):
        super().__init__()
        self.no_answer = no_answer
        self.without = 0
        """Questions that were given no answer."""
        self.compared, self.sums = 0, np.zeros(2)
        """Questions whose answers are known, and their exact matches and F1, summed."""

    def expected(self, value: Any, id_: str, column: str) -> list[str] | None:
        """The right answers: text, a list of it, or as in training; None where none are said."""
        if value is None:
            return None
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return value
        try:
            return answers_of(value, column)[0]
        except UnusableError as error:
            raise UserError(
                f"{id_}: {error}; correct the row, or leave --label-column out"
            ) from None

    def made(self, scores: Answered) -> dict[str, Any]:
        """The answer, its score and its characters, null where there is none; the probability that
        there is none, and further answers."""
        context, found = scores
        best = found.best(self.no_answer)
        others = [span for span in found.spans if span != best]
        return {
            "answer": answer_text(context, best),
            "score": _rounded(found.none if best is None else best.score),
            "start": best and best.start,
            "end": best and best.stop,
            "no_answer": _rounded(found.none),
            "others": [
                {"answer": answer_text(context, span), "score": _rounded(span.score)}
                for span in others
            ],
        }

    def count(self, line: Mapping[str, Any]) -> None:
        """Counts a question."""
        self.without += line["start"] is None
        if (right := line.get("expected")) is not None:
            exact, f1 = scores_of(line["answer"], right)
            self.compared += 1
            self.sums += exact, f1
            wanted = repr(right[0][:80]) if right else "no answer"
            text = f"farthest: {line['id']}, {wanted}, was given {line['answer'][:80]!r}"
            self.remember(1 - f1, text)

    def counts(self) -> str:
        """Number of questions without an answer, as text."""
        return f"{self.without:,} without an answer" if self.without else ""

    def loss(self, source: str) -> AnswerLoss:
        """The scores of the questions whose answers are known."""
        exact, f1 = (self.sums / max(self.compared, 1)).tolist()
        scores = dict(zip(SCORES, (exact, f1), strict=True))
        return AnswerLoss(source, float("nan"), exact, self.compared, scores=scores)


def _rounded(score: float) -> float:
    return float(f"{score:.6g}")
