"""Held-out questions: the loss of their windows, and SQuAD's scores of their answers.

    texts of the questions --windows--> packed rows [B, T] --answerer--> logits --> answers

Windows are cut again from the texts, all of a question's together, so that its best answer in all
of them is compared.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.data.rows.pack import best_fit_rows
from lmwright.data.rows.store import spread
from lmwright.data.tokens.answers import (
    Windows,
    document_of,
    in_windows,
    marks_of,
    tokens_of,
)
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.evals.documents import Place, rows_of
from lmwright.evals.loss import SourceLoss, compiled, of_all_hosts
from lmwright.evals.spans import answer_text, flat_windows, found_in
from lmwright.evals.squad import scores_of
from lmwright.evals.tables import of_source, print_table, table_of
from lmwright.objectives.answer_spans import Answer, Spans

Put = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Rows:
    """The form of packed rows: how many a batch has, and their tokens."""

    count: int
    seq_len: int


@lru_cache(maxsize=8)
def _spans(model: Model, objective: Answer, compute: Compute) -> Callable[..., Spans]:
    def spans(w: Tree, batch: Batch) -> Spans:
        return objective.spans(model, w, batch, compute)

    return compiled(spans, compute)


def evaluate_answers(
    model: Model,
    objective: Answer,
    compute: Compute,
    weights: Tree,
    source: str,
    questions: Sequence[Mapping[str, Any]],
    tokenizer: TextTokenizer,
    around: tuple[Sequence[int], Sequence[int]],
    rows: Rows,
    place: Put = lambda batch: batch,
) -> SourceLoss:
    """Loss and scores of held-out questions, with what is `around` a text; `place` puts a batch on
    the devices."""
    texts = ([each[name] for each in questions] for name in ("question", "context"))
    made = in_windows(tokenizer, *texts, Windows(*objective.windows), around)
    answers = [
        tokens_of(of.offsets, each["starts"][0], each["starts"][0] + len(each["answers"][0]))
        if each["answers"] else None
        for each, of in zip(questions, made, strict=True)
    ]  # fmt: skip
    windows = flat_windows(made)
    documents, heads, marks = [], [], []
    for number, begin in windows:
        ids, head = document_of(made[number], begin, around)
        documents.append(ids)
        heads.append(head)
        marks.append(marks_of(made[number], begin, len(ids), head, answers[number]))
    run, sums = _spans(model, objective, compute), np.zeros(2)
    found: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in questions]
    for batch, places in _batches(documents, marks, rows):
        spans = run(weights, place(batch))
        sums += float(spans.nll), float(spans.weight)
        logits = of_all_hosts(spans.logits).astype(np.float64)
        for at, where in places.items():
            number, begin = windows[at]
            found[number].append((begin, heads[at], logits[where.row, where.tokens]))
    scores = np.zeros(2)
    for each, of, mine in zip(questions, made, found, strict=True):
        context = each["context"]
        best = found_in(context, of, mine, objective.max_answer_tokens).best(objective.no_answer)
        scores += scores_of(answer_text(context, best), each["answers"])
    exact, f1 = (scores / max(len(questions), 1)).tolist()
    return SourceLoss(
        source, sums[0] / max(sums[1], 1.0), exact, len(questions), 0,
        scores={"exact_match": exact, "answer_f1": f1},
    )  # fmt: skip


def _batches(
    documents: Sequence[Sequence[int]], marks: Sequence[np.ndarray], rows: Rows
) -> Iterator[tuple[Batch, dict[int, Place]]]:
    """Batches of packed rows with the marks of their tokens, and the places of the documents."""
    row = best_fit_rows(np.array([len(ids) for ids in documents], np.int64), rows.seq_len)
    for start in range(0, int(row.max(initial=-1)) + 1, rows.count):
        batch, places = rows_of(documents, row, start, rows.count, rows.seq_len)
        weight = np.zeros(batch.tokens.shape, np.float32)
        for number, at in places.items():
            weight[at.row, at.tokens] = marks[number]
        yield replace(batch, loss_weight=weight), places


def some_of(
    questions: Sequence[Mapping[str, Any]], rows: int, max_rows: int | None
) -> list[Mapping[str, Any]]:
    """Questions spread evenly over all of them: the share of them that `max_rows` is of their
    `rows`."""
    share = min(1.0, (max_rows or rows) / max(rows, 1))
    return [questions[at] for at in spread(len(questions), math.ceil(share * len(questions)))]


def print_answers(
    losses: Sequence[SourceLoss], compute: Compute, console: Console | None = None
) -> None:
    """Prints the scores of each source."""
    names = ("source", "questions", "loss", "exact match", "F1")
    rows = []
    for loss in losses:
        name, count, mean = of_source(loss)
        scores = (f"{100 * loss.scores[score]:.2f}" for score in SCORES)
        rows.append((name, count, "-" if math.isnan(loss.loss) else mean, *scores))
    print_table(table_of(names, rows), compute, console)


SCORES = ("exact_match", "answer_f1")
"""Scores of a source, as fractions; they are printed in percent, as SQuAD's script gives them."""
