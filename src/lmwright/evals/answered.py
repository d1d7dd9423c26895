"""Held-out questions: the loss of their windows, and SQuAD's scores of their answers.

    texts of the questions --windows--> packed rows [B, T] --answerer--> logits --> answers

Windows are cut again from the texts, all of a question's together, so that its best answer in all
of them is compared.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lmwright.config.run import Run
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.data.rows.best_fit import best_fit_rows
from lmwright.data.rows.store import TokenStore, spread
from lmwright.data.tokens.answers import (
    Context,
    Windows,
    document_of,
    in_windows,
    marks_of,
    tokens_of,
)
from lmwright.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from lmwright.evals.documents import rows_of
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.of_hosts import of_all_hosts
from lmwright.evals.spans import answer_text, flat_windows, found_in
from lmwright.evals.squad import scores_of
from lmwright.evals.tables import TaskLoss
from lmwright.objectives.answer_spans import Answer, Spans

SCORES = ("exact_match", "answer_f1")
"""Scores of a source, as shares; they are printed in percent, as SQuAD's script gives them."""


@dataclass(frozen=True)
class AnswerLoss(TaskLoss):
    """Means over questions; `loss` is NaN where it is not known."""

    names: ClassVar[tuple[str, ...]] = ("source", "questions", "loss", "exact match", "F1")

    @property
    def line(self) -> tuple[str, ...]:
        """The line of this source."""
        name, count, mean, *figures = super().line
        return (name, count, "-" if math.isnan(self.loss) else mean, *figures)

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        return tuple(f"{100 * self.scores[score]:.2f}" for score in SCORES)


class AnswerRowTally(RowTally):
    """Tally of held-out questions, whose windows are rows."""

    def __init__(self, objective: Answer):
        super().__init__(objective)
        self.questions: Sequence[Mapping[str, Any]] = ()
        self.made: list[Context] = []
        """Context of each question as tokens, in windows."""
        self.windows: list[tuple[int, int]] = []
        """Question and begin of each document."""
        self.heads: list[int] = []
        """Tokens of each document before its part of the context."""
        self.found: list[list[tuple[int, int, np.ndarray]]] = []
        """Begin, head and logits of each window of each question."""

    def batches(self, run: Run, store: TokenStore, source: str, num_rows: int) -> Iterator[Rows]:
        """Rows of the windows of a source's questions, of which as many are taken as
        `eval.max_rows` have."""
        self.questions = some_of(
            store.eval_questions(source), store.eval_rows(source), run.eval.max_rows
        )
        tokenizer, said = load_tokenizer(store.tokenizer_dir), run.data.tokenize
        around = (
            (tokenizer.bos_id,) if said.prepend == "bos" else (),
            (tokenizer.eos_id,) if said.append == "eos" else (),
        )
        documents, marks = self._documents(tokenizer, around)
        return _batches(documents, marks, num_rows, store.seq_len)

    def _documents(
        self, tokenizer: TextTokenizer, around: tuple[Sequence[int], Sequence[int]]
    ) -> tuple[list[Sequence[int]], list[np.ndarray]]:
        """Windows of the questions as documents, with what is `around` a text, and their marks."""
        texts = ([each[name] for each in self.questions] for name in ("question", "context"))
        self.made = in_windows(tokenizer, *texts, Windows(*self.objective.windows), around)
        self.found = [[] for _ in self.questions]
        answers = [
            tokens_of(of.offsets, each["starts"][0], each["starts"][0] + len(each["answers"][0]))
            if each["answers"] else None
            for each, of in zip(self.questions, self.made, strict=True)
        ]  # fmt: skip
        self.windows = flat_windows(self.made)
        documents, marks = [], []
        for number, begin in self.windows:
            ids, head = document_of(self.made[number], begin, around)
            documents.append(ids)
            self.heads.append(head)
            marks.append(marks_of(self.made[number], begin, len(ids), head, answers[number]))
        return documents, marks

    @staticmethod
    def measure(model: Model, objective: Answer, w: Tree, batch: Batch, compute: Compute) -> Spans:
        """Scores of the tokens of a batch, and its loss."""
        return objective.spans(model, w, batch, compute)

    def add(self, rows: Rows, sums: Spans) -> None:
        """Counts a batch of `batches`, and keeps the scores of its documents."""
        self.total += float(sums.nll)
        self.count += float(sums.weight)
        logits = of_all_hosts(sums.logits).astype(np.float64)
        for at, where in rows["places"].items():
            number, begin = self.windows[at]
            self.found[number].append((begin, self.heads[at], logits[where.row, where.tokens]))

    def loss(self, source: str) -> AnswerLoss:
        """The loss of the windows, and scores of the best answer to each question."""
        objective, scores = self.objective, np.zeros(2)
        for each, of, mine in zip(self.questions, self.made, self.found, strict=True):
            context = each["context"]
            best = found_in(context, of, mine, objective.max_answer_tokens).best(
                objective.no_answer
            )
            scores += scores_of(answer_text(context, best), each["answers"])
        exact, f1 = (scores / max(len(self.questions), 1)).tolist()
        return AnswerLoss(
            source, self.means[0], exact, len(self.questions),
            scores=dict(zip(SCORES, (exact, f1), strict=True)),
        )  # fmt: skip


def _batches(
    documents: Sequence[Sequence[int]], marks: Sequence[np.ndarray], num_rows: int, seq_len: int
) -> Iterator[Rows]:
    """Batches of packed rows with the marks of their tokens, and the `places` of the documents."""
    row = best_fit_rows(np.array([len(ids) for ids in documents], np.int64), seq_len)
    for start in range(0, int(row.max(initial=-1)) + 1, num_rows):
        batch, places = rows_of(documents, row, start, num_rows, seq_len)
        weight = np.zeros(batch.tokens.shape, np.float32)
        for number, at in places.items():
            weight[at.row, at.tokens] = marks[number]
        yield vars(batch) | {"loss_weight": weight, "places": places}


def some_of(
    questions: Sequence[Mapping[str, Any]], rows: int, max_rows: int | None
) -> list[Mapping[str, Any]]:
    """Questions spread evenly over all of them: the share of them that `max_rows` is of their
    `rows`."""
    share = min(1.0, (max_rows or rows) / max(rows, 1))
    return [questions[at] for at in spread(len(questions), math.ceil(share * len(questions)))]
