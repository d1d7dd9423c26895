"""Questions of a file as a task of lm-evaluation-harness.

{"query": "Question: ...", "choices": ["a", "b"], "gold": 1}     the most likely choice counts
{"context": "...", "continuation": "..."}                       it counts if greedy decoding says it

A file has questions of one kind. A space is put between a context and its continuation where
neither has one.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmwright.data.json_text import json_reason
from lmwright.errors import UserError

CHOICES, FOLLOWS = ("query", "choices", "gold"), ("context", "continuation")


def read_questions(path: Path) -> dict[str, Any]:
    """The harness's description of a task that asks the questions of a .jsonl file. Raises
    UserError for a line that is no such question."""
    numbered = list(_rows(path))
    if not numbered:
        raise UserError(f"{path}: holds no question")
    kind = _kind(numbered[0][1])
    for number, row in numbered:
        if _kind(row) != kind and _problem(row, _kind(row)) is None:
            raise UserError(
                f"{path}:{number}: has {' and '.join(_kind(row))}, and the questions before it "
                f"have {' and '.join(kind)}; a file has questions of one kind, so give these a "
                "file of their own"
            )
        if problem := _problem(row, kind):
            raise UserError(f"{path}:{number}: {problem}")
    rows = [{name: row[name] for name in kind} for _, row in numbered]
    shared = {
        "task": path.name.removesuffix(".gz").removesuffix(".jsonl"),
        "custom_dataset": lambda **_: _dataset(rows),
        "test_split": "test",
        "fewshot_split": "test",
    }
    if kind == CHOICES:
        return shared | {
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [_mean("acc"), _mean("acc_norm")],
        }
    return shared | {
        "output_type": "loglikelihood",  # for which the harness puts nothing in between
        "doc_to_text": "context",
        "doc_to_target": _after_a_space,
        "target_delimiter": "",
        "metric_list": [_mean("acc"), _perplexity()],
    }


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    return CHOICES if "query" in row or "choices" in row else FOLLOWS


def _after_a_space(question: dict[str, Any]) -> str:
    context, continuation = question["context"], question["continuation"]
    joined = context[-1].isspace() or continuation[0].isspace()
    return str(continuation if joined else f" {continuation}")


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _perplexity() -> dict[str, Any]:
    return {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return {"test": datasets.Dataset.from_list(rows)}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({json_reason(error, 'line')})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: is not an object with fields")
    return row


def _problem(row: dict[str, Any], kind: tuple[str, ...]) -> str | None:
    """The fault of a question; None for a good one."""
    for name in kind:
        if name not in row:
            return f"has no {name!r}; a question has {', '.join(CHOICES)} or {', '.join(FOLLOWS)}"
    texts = [row[name] for name in kind if name not in ("choices", "gold")]
    if kind == CHOICES:
        choices, gold = row["choices"], row["gold"]
        if not isinstance(choices, list) or len(choices) < 2:
            return "choices: give at least two texts"
        if type(gold) is not int or not 0 <= gold < len(choices):
            return f"gold: {gold!r} is not the number of a choice, from 0 to {len(choices) - 1}"
        texts += choices
    if any(not isinstance(text, str) or not text for text in texts):
        return "a text is empty or no text"
    return None
