"""Predict: the class or the number of each text of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --classifier--> scores

Texts share rows as in training, and come out in the order of the file. What is written grows as
OUT.part beside OUT, where a run that was interrupted goes on, and takes the name OUT at the end.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from rich.console import Console

from lmwright.config.run import Source
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.rows.pack import best_fit_rows
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.data.tokens.classes import joined
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, row_compute
from lmwright.evals.tallies import Tally, tally_of
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.tensor_hash import weights_hash
from lmwright.formats.tokenizer_files import ids_around
from lmwright.models.classifier import Classifier

CHUNK = 1024  # texts that are packed together
BATCH_TOKENS = 8192
SHORTEST = 128  # tokens of a row


class Predictor:
    """A classifier, ready for texts."""

    def __init__(self, loaded: LoadedModel, compute: Compute):
        if not isinstance(loaded.model, Classifier):
            raise UserError(
                f"{loaded.path}: is no classifier; train one with objective.kind = 'classify' or "
                "'regress' (docs/classification.md)"
            )
        self.model, self.tokenizer, self.weights = loaded.model, loaded.tokenizer, loaded.weights
        around = ids_around(self.tokenizer)
        if loaded.prefix is not None:  # a run's own, whatever its tokenizer's file says
            around = (loaded.prefix, loaded.suffix)
        self.around = around
        self.most: int = self.model.seq_len
        self._run = jax.jit(partial(_logits, self.model, compute))

    def encode(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of each text, with its second one if there are any, as in training, and whether they
        were cut to what the model takes."""
        before, after = self.around
        parts = [self.tokenizer.encode_batch(each) for each in (texts, seconds) if each is not None]
        # as in training, an empty second text is none
        rows = ([first, *filter(None, rest)] for first, *rest in zip(*parts, strict=True))
        fitted = [joined(row, self.most, before, after) for row in rows]
        # a text that no token stands for is one token all the same
        end = [self.tokenizer.eos_id or 0]
        return [[*before, *ids, *after] or end for ids, _ in fitted], [cut for _, cut in fitted]

    def scores(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Raw scores float64 [N, K] of documents, lists of ids."""
        lengths = np.array([len(ids) for ids in documents], np.int64)
        width = SHORTEST
        while width < lengths.max(initial=1):
            width *= 2
        width = min(width, self.most)
        rows = best_fit_rows(lengths, width)
        found = np.zeros((len(documents), max(1, len(self.model.labels))))
        size = max(1, BATCH_TOKENS // width)
        for start in range(0, int(rows.max(initial=-1)) + 1, size):
            batch, places = _batch(documents, rows, start, size, width)
            logits = np.asarray(self._run(self.weights, batch), np.float64)
            for number, (row, place) in places.items():
                found[number] = logits[row, place]
        return found


def _logits(model: Classifier, compute: Compute, w: Tree, batch: Batch) -> Array:
    return model.classify(w, batch, compute)[0]


def _batch(
    documents: Sequence[Sequence[int]], rows: np.ndarray, start: int, size: int, width: int
) -> tuple[Batch, dict[int, tuple[int, int]]]:
    """Rows start..start+size-1, padded to that many, and the place of each document in them."""
    tokens, ids, positions = (np.zeros((size, width), np.int32) for _ in range(3))
    filled, count = np.zeros(size, int), np.zeros(size, int)
    places = {}
    for number in np.flatnonzero((rows >= start) & (rows < start + size)).tolist():
        row, length = int(rows[number]) - start, len(documents[number])
        here = slice(filled[row], filled[row] + length)
        places[number] = (row, int(count[row]))
        count[row] += 1
        tokens[row, here], ids[row, here] = documents[number], count[row]
        positions[row, here] = np.arange(length)
        filled[row] += length
    return Batch(tokens, ids, positions, np.zeros((size, width), np.float32)), places


@dataclass(frozen=True)
class Columns:
    """Columns beside that of the texts."""

    pair: str | None = None
    label: str | None = None


def predict_lines(
    predictor: Predictor, rows: Iterator[Row | Bad], tally: Tally, columns: Columns
) -> Iterator[list[str]]:
    """JSON lines of rows, a chunk at a time, in their order. Raises UserError for a label that is
    none of the model's."""
    while chunk := list(islice(rows, CHUNK)):
        good = [row for row in chunk if isinstance(row, Row)]
        metas = [json.loads(row.meta) for row in good]
        seconds = columns.pair and [str(meta.get(columns.pair) or "") for meta in metas]
        documents, cut = predictor.encode([row.text for row in good], seconds)
        real = [
            columns.label and tally.expected(meta.get(columns.label), row.id, columns.label)
            for row, meta in zip(good, metas, strict=True)
        ]
        found = iter(zip(predictor.scores(documents), cut, real, strict=True))
        lines = []
        for row in chunk:
            made: dict[str, Any] = {"row": row.number}
            if isinstance(row, Bad):
                made["error"] = row.reason
            else:
                each, was_cut, expected = next(found)
                made |= {"id": row.id, **tally.made(each)}
                made |= {"cut": True} if was_cut else {}
                made |= {"expected": expected} if expected is not None else {}
            tally.add(made)
            lines.append(json.dumps(made, ensure_ascii=False) + "\n")
        yield lines


def predict_command(
    path: str,
    file: str,
    *,
    out: str | None = None,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    adapter: str | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> int:
    """Writes the class and the scores, or the number, of each row of a csv, tsv, jsonl or parquet
    file, or of each line of a txt file, as JSON lines to `out` or the terminal; returns 0. Raises
    UserError where the model is no classifier, the file cannot be read, or `out` exists."""
    if out is not None and Path(out).exists() and not overwrite:
        raise UserError(f"{out}: exists; replace it with --overwrite or choose another name")
    columns = Columns(pair_column, label_column)
    beside = tuple(filter(None, (pair_column, label_column)))
    read = {"text_column": text_column, "id_column": id_column, "meta_columns": beside}
    source = Source(path=file, documents="line", **read)
    try:
        files = find_files(source)
    except UserError as error:
        raise _own_words(error) from None
    compute = row_compute(precision, kernels)
    predictor = Predictor(load_model(path, adapter), compute)
    tally = tally_of(predictor.model.labels)

    def run(done: int, write: Callable[[str], Any]) -> None:
        rows = (row for each in files for row in read_rows(Slice(each), source))
        try:
            left = islice(rows, done, None)
            for lines in predict_lines(predictor, left, tally, columns):
                write("".join(lines))
        except UserError as error:
            raise _own_words(error) from None

    if out is None:
        run(0, sys.stdout.write)
    else:
        stamps = [[each.path, each.size, each.stamp] for each in files]
        asked = {"model": weights_hash(predictor.weights), "files": stamps, **read, **vars(columns)}
        done = _write_resumed(Path(out), asked, run, tally)
        print(f"{out}: {f'{done:,} rows were there; ' if done else ''}", end="")
    console = Console(stderr=out is None, highlight=False)
    console.print(tally.line(predictor.most), markup=False, soft_wrap=True)
    if label_column is not None:
        tally.show(Path(file).name, compute, console)
    return 0


def _own_words(error: UserError) -> UserError:
    """The error of a reader, with the options of this command for the fields of a run."""
    text = str(error).removeprefix("data.sources: ")
    for name in ("text_column", "id_column"):
        text = text.replace(f"data.sources.{name}", f"--{name.replace('_', '-')}")
    text = text.replace("data.sources.meta_columns", "--pair-column or --label-column")
    return UserError(text)


def _write_resumed(
    out: Path, asked: dict[str, Any], run: Callable[[int, Callable[[str], Any]], None], tally: Tally
) -> int:
    """Writes `out` by way of OUT.part, after the rows that an interrupted run with the same wishes
    left there; returns how many these are."""
    part, note = (out.with_name(f"{out.name}{ending}") for ending in (".part", ".part.json"))
    done = 0
    try:
        wishes = json.dumps(asked)
        known = note.exists() and note.read_text("utf-8") == wishes
        with part.open("r+b" if known and part.exists() else "w+b") as raw:
            done = _whole_lines(raw, tally)
            note.write_text(wishes, encoding="utf-8")
            run(done, lambda text: (raw.write(text.encode()), raw.flush()))
        os.replace(part, out)
        note.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    return done


def _whole_lines(raw: Any, tally: Tally) -> int:
    """Counts the lines of a file into the tally, and cuts one off that was not finished."""
    count = end = 0
    for line in raw:
        if not line.endswith(b"\n"):
            break
        tally.add(json.loads(line))
        count, end = count + 1, end + len(line)
    raw.seek(end)
    raw.truncate()
    return count
