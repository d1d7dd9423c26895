"""Windows: a question with a part of its context as one document, and the answer in its tokens.

    [before] question [between] context tokens 0.. [after]
    [before] question [between] .. context tokens [after]

Between them is what the tokenizer's own file puts there, else what ends a text. A context that is
longer than a window slides through it, so that neighbors share `overlap` tokens.

In a window without the answer, the first token is the answer, as in transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lmwright.config.rows import QUESTIONS
from lmwright.config.run import Data
from lmwright.data.manifest import Manifest
from lmwright.data.tokens.around import ids_between
from lmwright.data.tokens.tags import DTYPE
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError

STARTS, ENDS, CONTEXT = 1, 2, 4
"""Bits beside a token: the answer starts there, ends there, the context begins there."""


@dataclass(frozen=True)
class Windows:
    """The most tokens of a window, and the tokens of a context that it shares with the next."""

    window_tokens: int
    overlap: int

    labels: ClassVar[tuple[str, ...]] = ()

    def check(self, counts: Sequence[Mapping[str, Any]], _folder: Path) -> dict[str, Any]:
        """Returns no facts, since any answers will do."""
        return {}


class Context(NamedTuple):
    """A question and its context as tokens."""

    question: list[int]
    ids: list[int]
    """Tokens of the whole context."""
    offsets: np.ndarray
    """int64 [tokens, 2]: the characters of the context that each stands for."""
    starts: list[int]
    """The first token of the context in each window."""
    room: int
    """Tokens of the context that a window takes."""
    cut: bool
    """True if the question was longer than half of a window, and lost its end."""
    between: tuple[int, ...]
    """Ids between the question and the context."""

    def stop(self, start: int) -> int:
        """The end of the window that begins at this token."""
        return min(start + self.room, len(self.ids))


def in_windows(
    tokenizer: TextTokenizer,
    questions: Sequence[str],
    contexts: Sequence[str],
    windows: Windows,
    around: tuple[Sequence[int], Sequence[int]],
) -> list[Context]:
    """Questions and their contexts as tokens, cut into windows, with what is `around` a text."""
    between = ids_between(tokenizer, *around, otherwise=around[1])
    others = len(around[0]) + len(between) + len(around[1])
    encode = tokenizer.plain.encode_batch
    asked = encode(list(questions), add_special_tokens=False)
    read = encode(list(contexts), add_special_tokens=False)
    made = []
    for question, context in zip(asked, read, strict=True):
        ids = question.ids[: (windows.window_tokens - others) // 2]
        room = windows.window_tokens - others - len(ids)
        count = len(context.ids)
        step = room - windows.overlap
        starts = list(range(0, max(1, count - windows.overlap), step))
        offsets = np.array(context.offsets, np.int64).reshape(-1, 2)
        cut = len(ids) < len(question.ids)
        made.append(Context(ids, context.ids, offsets, starts, room, cut, between))
    return made


def tokens_of(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last token that characters start..stop-1 have a part in; None where no
    token does."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < stop))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def text_at(context: str, offsets: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """The characters of a context that tokens first..last stand for, without blanks around."""
    start, stop = int(offsets[first, 0]), int(offsets[last, 1])
    text = context[start:stop]
    start += len(text) - len(text.lstrip())
    return start, max(start, start + len(text.strip()))


def document_of(
    made: Context, start: int, around: tuple[Sequence[int], Sequence[int]]
) -> tuple[list[int], int]:
    """Ids of the window that begins at token `start` of the context, and the position of that token
    in it."""
    before, after = around
    head = [*before, *made.question, *made.between]
    return [*head, *made.ids[start : made.stop(start)], *after], len(head)


def marks_of(
    made: Context, start: int, size: int, head: int, answer: tuple[int, int] | None
) -> np.ndarray:
    """uint16 [size] beside the tokens of a window: where its context begins, and where the answer,
    tokens of the context, starts and ends."""
    marks = np.zeros(size, DTYPE)
    if head < size:
        marks[head] |= CONTEXT
    first = last = 0
    if answer is not None and start <= answer[0] and answer[1] < made.stop(start):
        first, last = (head + token - start for token in answer)
    marks[first] |= STARTS
    marks[last] |= ENDS
    return marks


class AnswerColumn:
    """The answers beside one token file."""

    per_token: ClassVar[bool] = True

    def __init__(self, windows: Windows, source: str):
        self.windows, self.source = windows, source
        self.tally = dict.fromkeys(
            ("questions", "without_answer", "in_no_window", "windows_without", "widened", "cut"), 0
        )

    def beside(
        self,
        tokenizer: TextTokenizer,
        row: Mapping[str, Any],
        around: tuple[Sequence[int], Sequence[int]],
    ) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(ids, marks uint16, bytes of text) of each window of a question."""
        answer, context = None, row["context"]
        (made,) = in_windows(tokenizer, [row["question"]], [context], self.windows, around)
        if row["answers"]:
            start = row["starts"][0]
            stop = start + len(row["answers"][0])
            answer = tokens_of(made.offsets, start, stop)
        if answer is not None:
            begin, end = text_at(context, made.offsets, *answer)
            self.tally["widened"] += context[begin:end] != row["answers"][0].strip()
        found, held = [], 0
        for begin in made.starts:
            ids, head = document_of(made, begin, around)
            marks = marks_of(made, begin, len(ids), head, answer)
            part = (
                text_at(context, made.offsets, begin, made.stop(begin) - 1) if made.ids else (0, 0)
            )
            size = len(row["question"].encode()) + len(context[slice(*part)].encode())
            found.append((np.array(ids, np.uint32), marks, size))
            held += not marks[0] & STARTS
        self.tally["questions"] += 1
        self.tally["without_answer"] += answer is None
        self.tally["in_no_window"] += answer is not None and not held
        self.tally["windows_without"] += len(found) - held
        self.tally["cut"] += made.cut
        return found

    def counts(self) -> dict[str, int]:
        """Counts of questions: all, those without an answer, those with an answer that no window
        holds whole, those that lost their end; windows without an answer, and answers that are
        wider in tokens than in characters."""
        return self.tally


def answers_text(counts: Mapping[str, Any]) -> str:
    """The questions of a source as text, from its counts; empty where it has none."""
    if not counts.get("questions"):
        return ""
    text = f"{counts['questions']:,} questions in {counts['docs']:,} windows"
    for name, what in (
        ("without_answer", "questions without an answer"),
        ("in_no_window", "with one that no window holds whole"),
        ("windows_without", "windows without an answer"),
        ("widened", "answers widened to whole tokens"),
    ):
        text += f", {counts[name]:,} {what}" if counts[name] else ""
    return text


def question_line(row: Mapping[str, Any], id_: str) -> str:
    """A held-out question as a line of its source's file."""
    kept = {name: row[name] for name in ("question", "context", "answers", "starts")}
    return json.dumps({"id": id_, **kept}, ensure_ascii=False) + "\n"


def gather_questions(tokenized: Manifest, folder: Path) -> None:
    """Writes the held-out questions of each source, in input order, below a folder."""
    sources: dict[str, list[Path]] = {}
    for name in sorted(n for n in tokenized.files if n.endswith(f".{QUESTIONS}")):
        sources.setdefault(str(Path(name).parent), []).append(Path(tokenized.folder) / name)
    for source, files in sources.items():
        (folder / source).mkdir(parents=True, exist_ok=True)
        with open(folder / source / QUESTIONS, "wb") as out:
            for file in files:
                out.write(file.read_bytes())


def windows_of(data: Data, seq_len: int, windows: tuple[int, int] | None) -> Windows:
    """The windows of a run with rows of `seq_len`. Raises UserError where they are longer, none are
    asked for, or the places of answers would move."""
    if windows is None:
        raise UserError("data.sources.rows: \"answered\" needs objective.kind = 'answer'; set it")
    if data.normalize.unicode != "none":
        raise UserError(
            f"data.normalize.unicode: {data.normalize.unicode!r} would shift the positions of "
            'answers; set "none"'
        )
    window_tokens, overlap = windows
    if window_tokens > seq_len:
        raise UserError(
            f"objective.window_tokens: {window_tokens} are more than a row has, {seq_len}; use "
            f"{seq_len} at most, or raise data.pack.seq_len"
        )
    return Windows(window_tokens, overlap)
