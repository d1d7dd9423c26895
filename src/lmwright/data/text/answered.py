"""Answered questions: rows of a question, a context, and the answers that stand in it.

{"question": "Who slept?", "context": "Ada slept.",
 "answers": {"text": ["Ada"], "answer_start": [0]}}
--answered_question--> the same, answers as lists; none of them where the context has none

A file of SQuAD (https://arxiv.org/abs/1606.05250) holds paragraphs, whose questions are such rows.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from lmwright.config.rows import ANSWERED, ROW_PARTS
from lmwright.config.run import Source
from lmwright.data.text.chat_render import UnusableError


def answered_question(row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The question, the context, the answers and their first characters in it. Raises UnusableError
    for a part that is missing, empty or of another type, and for an answer that the context does
    not have at its place."""
    columns = {name: source.columns.get(name, name) for name in ROW_PARTS[ANSWERED][0]}
    for name in ("question", "context"):
        text = row.get(columns[name])
        if not isinstance(text, str) or not text.strip():
            raise UnusableError(f"{columns[name]!r} is {'empty' if text == '' else 'not text'}")
    question, context = row[columns["question"]], row[columns["context"]]
    texts, starts = answers_of(row.get(columns["answers"]), columns["answers"])
    for place, (text, start) in enumerate(zip(texts, starts, strict=True), 1):
        if start < 0 or not context.startswith(text, start):
            raise UnusableError(
                f"answer {place} of {columns['answers']!r}, {text[:40]!r}, is not what "
                f"{columns['context']!r} has at character {start}, "
                f"{context[max(start, 0) :][:40]!r}; count characters from 0, not bytes"
            )
    return {"question": question, "context": context, "answers": texts, "starts": starts}


def answers_of(value: Any, column: str) -> tuple[list[str], list[int]]:
    """The answers of a row and their first characters, of {"text": [...], "answer_start": [...]} or
    a list of such pairs, also as the text of a cell of csv. Raises UnusableError for what is
    neither."""
    value = _of_cell(value) if isinstance(value, str) else value
    if value is None or value == []:
        return [], []
    if isinstance(value, list):
        if not all(isinstance(each, Mapping) for each in value):
            raise UnusableError(f"{column!r} holds something other than objects")
        value = {name: [each.get(name) for each in value] for name in ("text", "answer_start")}
    if not isinstance(value, Mapping):
        raise UnusableError(f"{column!r} is not an object with 'text' and 'answer_start'")
    texts, starts = value.get("text"), value.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise UnusableError(f"{column!r} has no lists 'text' and 'answer_start' of one length")
    for place, (text, start) in enumerate(zip(texts, starts, strict=True), 1):
        if not isinstance(text, str) or not text.strip():
            raise UnusableError(f"answer {place} of {column!r} is empty or not text")
        if isinstance(start, bool) or not isinstance(start, int):
            raise UnusableError(f"'answer_start' {place} of {column!r} is not a whole number")
    return texts, starts


def _of_cell(text: str) -> Any:
    """The value of a cell of csv: written as JSON, by Python or, with arrays, by pandas; the text
    itself where it is none of these, None for an empty one."""
    if not text.strip():
        return None
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(_Lists().visit(ast.parse(text.strip(), mode="eval")))
    return text


class _Lists(ast.NodeTransformer):
    """`array([0], dtype=int32)` as its list."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The list of an array; any other call as it is, which no literal has."""
        is_array = isinstance(node.func, ast.Name) and node.func.id == "array"
        return node.args[0] if is_array and len(node.args) == 1 else node


def rows_of_squad(value: Any, source: Source) -> Any:
    """The rows of a file of SQuAD, with the columns of the source; any other value as it is."""
    if source.rows != ANSWERED or not isinstance(value, Mapping) or "data" not in value:
        return value
    columns = {name: source.columns.get(name, name) for name in ROW_PARTS[ANSWERED][0]}
    rows = []
    for question in _questions(value["data"]):
        row = {name: part for name, part in question.items() if name not in columns}
        rows.append(row | {column: question.get(name) for name, column in columns.items()})
    return rows


def _questions(articles: Any) -> Iterator[dict[str, Any]]:
    """Questions of articles, each with its context; what has another form has none."""
    for article in _objects(articles):
        for paragraph in _objects(article.get("paragraphs")):
            for question in _objects(paragraph.get("qas")):
                yield {**question, "context": paragraph.get("context")}


def _objects(values: Any) -> list[Mapping[str, Any]]:
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []
