"""Two models on the same questions: is the difference more than chance?

    answers.json, answers.json --questions of both--> differences --> interval, p

Differences are taken question by question, which needs far fewer questions than two standard
errors do (Miller 2024, https://arxiv.org/abs/2411.00640). Right or wrong answers are compared by
McNemar's exact test, other figures by the paired t-test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from rich.table import Table
from scipy import stats

from lmwright.errors import UserError
from lmwright.evals.answers import Question, is_mean, questions_of, values_of
from lmwright.evals.tables import table_of

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A figure of two models on the same questions."""

    task: str
    metric: str
    before: float
    """The other model's mean."""
    value: float
    low: float
    """The lower end of the 95 % interval of the difference of the means."""
    high: float
    p: float
    """The probability of such a difference, or a larger one, if the models were alike."""
    questions: int

    @property
    def difference(self) -> float:
        """The value less that of the other model."""
        return self.value - self.before


@dataclass(frozen=True)
class Comparison:
    """Differences of two models, and what is not alike in what they were asked."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def compare_answers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares what two models answered, as `eval --tasks --out` writes it, on the questions that
    both were asked. Raises UserError where there are none."""
    differences: list[Difference] = []
    notes: list[str] = []
    for task, samples in after["samples"].items():
        if task not in before["samples"]:
            notes.append(f"{task}: the other model was not asked")
            continue
        ours, theirs = questions_of(samples), questions_of(before["samples"][task])
        both = [question for question in ours if question in theirs]
        if len(both) < max(len(ours), len(theirs)):
            notes.append(f"{task}: {len(both)} questions are in both, of {len(ours)} and "
                         f"{len(theirs)}")  # fmt: skip
        if any(ours[q][0]["prompt_hash"] != theirs[q][0]["prompt_hash"] for q in both):
            notes.append(f"{task}: prompts differ, by shots or a chat template")
        first, second = _columns(before, task, theirs, both), _columns(after, task, ours, both)
        for name in (name for name in second if name in first):
            columns = np.array([first[name], second[name]])
            known = columns[:, ~np.isnan(columns).any(axis=0)]
            if known.size:
                differences.append(difference_of(task, name, *known))
    if not differences:
        raise UserError("--against: the models have no question in common; give the same --tasks")
    return Comparison(tuple(differences), tuple(notes))


def _columns(
    details: Mapping[str, Any], task: str, questions: Mapping[Question, Any],
    chosen: Sequence[Question],
) -> dict[str, list[float]]:  # fmt: skip
    """Values of the chosen questions by metric, those that are means; nan where there is none."""
    values = {question: dict(values_of(samples)) for question, samples in questions.items()}
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(values.values())):
        known = [metrics[name] for metrics in values.values() if name in metrics]
        if is_mean(details, task, name, known):
            columns[name] = [values[question].get(name, float("nan")) for question in chosen]
    return columns


def difference_of(task: str, metric: str, before: np.ndarray, after: np.ndarray) -> Difference:
    """The comparison of a figure of the same questions [N] by two models."""
    changes = after - before
    low = high = float(changes.mean())
    p = 0.0 if len(changes) > 1 and changes.any() else 1.0
    if len(changes) > 1 and changes.std() > 0:
        result = stats.ttest_rel(after, before)
        low, high = map(float, result.confidence_interval(LEVEL))
        p = float(result.pvalue)
    if set(np.unique([before, after])) <= {0.0, 1.0}:
        better, worse = int((changes > 0).sum()), int((changes < 0).sum())
        p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return Difference(
        task, metric, float(before.mean()), float(after.mean()), low, high, p, len(changes)
    )


def difference_table(differences: Sequence[Difference]) -> Table:
    """The comparison as a table."""
    rows = [
        (d.task, d.metric, str(d.questions), f"{d.before:.4f}", f"{d.value:.4f}",
         f"{d.difference:+.4f}", f"{d.low:+.4f} to {d.high:+.4f}", f"{d.p:.3g}")
        for d in differences
    ]  # fmt: skip
    head = ("task", "metric", "questions", "other", "this", "difference", "95% interval", "p")
    return table_of(head, rows)
