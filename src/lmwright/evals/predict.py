"""Predict: the class of each text of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --classifier--> scores

Texts share rows as in training, and come out in the order of the file. What is written grows as
OUT.part beside OUT, where a run that was interrupted goes on, and takes the name OUT at the end.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

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
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.tensor_hash import weights_hash
from lmwright.formats.tokenizer_files import ids_around
from lmwright.guard.terminal import visible
from lmwright.models.classifier import Classifier

CHUNK = 1024  # texts that are packed together
BATCH_TOKENS = 8192
SHORTEST = 128  # tokens of a row


@dataclass
class Tally:
    """Counts of what was predicted."""

    given: Counter = field(default_factory=Counter)
    """Texts by the class that they were given."""
    cut: int = 0
    """Texts longer than the model takes, of which the beginning was read."""
    bad: int = 0
    """Rows without a text."""

    def add(self, made: Mapping[str, Any]) -> None:
        """Counts a line of what is written."""
        if "label" not in made:
            self.bad += 1
            return
        self.given[made["label"]] += 1
        self.cut += "cut" in made

    def line(self, labels: Sequence[str], most: int) -> str:
        """A sentence for people."""
        counts = ", ".join(f"{self.given[label]:,} {label}" for label in labels)
        notes = [f"{self.given.total():,} texts: {counts}"]
        notes += [f"{self.cut:,} cut to {most:,} tokens"] if self.cut else []
        notes += [f"{self.bad:,} rows without a text"] if self.bad else []
        return visible("; ".join(notes), lines=False)


class Predictor:
    """A classifier, ready for texts."""

    def __init__(self, loaded: LoadedModel, compute: Compute):
        if not isinstance(loaded.model, Classifier):
            raise UserError(
                f"{loaded.path}: is no classifier; train one with objective.kind = 'classify' "
                "(docs/classification.md)"
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
        """Probabilities float64 [N, K] of documents, lists of ids."""
        lengths = np.array([len(ids) for ids in documents], np.int64)
        width = SHORTEST
        while width < lengths.max(initial=1):
            width *= 2
        width = min(width, self.most)
        rows = best_fit_rows(lengths, width)
        found = np.zeros((len(documents), len(self.model.labels)))
        size = max(1, BATCH_TOKENS // width)
        for start in range(0, int(rows.max(initial=-1)) + 1, size):
            batch, places = _batch(documents, rows, start, size, width)
            logits = np.asarray(self._run(self.weights, batch), np.float64)
            for number, (row, place) in places.items():
                found[number] = logits[row, place]
        found = np.exp(found - found.max(1, keepdims=True))
        return found / found.sum(1, keepdims=True)


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


def predict_lines(
    predictor: Predictor, rows: Iterator[Row | Bad], tally: Tally, pair_column: str | None = None
) -> Iterator[list[str]]:
    """JSON lines of rows, a chunk at a time, in their order."""
    labels = predictor.model.labels
    while chunk := list(islice(rows, CHUNK)):
        texts = [row.text for row in chunk if isinstance(row, Row)]
        seconds = None
        if pair_column is not None:
            metas = [json.loads(row.meta) for row in chunk if isinstance(row, Row)]
            seconds = [str(meta.get(pair_column) or "") for meta in metas]
        documents, cut = predictor.encode(texts, seconds)
        found = iter(zip(predictor.scores(documents), cut, strict=True))
        lines = []
        for row in chunk:
            made: dict[str, Any] = {"row": row.number}
            if isinstance(row, Bad):
                made["error"] = row.reason
            else:
                each, was_cut = next(found)
                scored = {k: round(float(v), 6) for k, v in zip(labels, each, strict=True)}
                made |= {"id": row.id, "label": labels[int(each.argmax())], "scores": scored}
                made |= {"cut": True} if was_cut else {}
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
    id_column: str | None = None,
    adapter: str | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> int:
    """Writes the class and the scores of each row of a csv, tsv, jsonl or parquet file, or of each
    line of a txt file, as JSON lines to `out` or the terminal; returns 0. Raises UserError where
    the model is no classifier, the file cannot be read, or `out` exists."""
    if out is not None and Path(out).exists() and not overwrite:
        raise UserError(f"{out}: exists; replace it with --overwrite or choose another name")
    columns: dict[str, Any] = {"text_column": text_column, "id_column": id_column}
    columns["meta_columns"] = (pair_column,) if pair_column else ()
    source = Source(path=file, documents="line", **columns)
    try:
        files = find_files(source)
    except UserError as error:
        raise _own_words(error) from None
    predictor = Predictor(load_model(path, adapter), row_compute(precision, kernels))
    tally = Tally()

    def run(done: int, write: Callable[[str], Any]) -> None:
        rows = (row for each in files for row in read_rows(Slice(each), source))
        try:
            left = islice(rows, done, None)
            for lines in predict_lines(predictor, left, tally, pair_column):
                write("".join(lines))
        except UserError as error:
            raise _own_words(error) from None

    if out is None:
        run(0, sys.stdout.write)
    else:
        stamps = [[each.path, each.size, each.stamp] for each in files]
        asked = {"model": weights_hash(predictor.weights), "files": stamps, **columns}
        done = _write_resumed(Path(out), asked, run, tally)
        print(f"{out}: {f'{done:,} rows were there; ' if done else ''}", end="")
    text = tally.line(predictor.model.labels, predictor.most)
    print(text, file=sys.stderr if out is None else sys.stdout)
    return 0


def _own_words(error: UserError) -> UserError:
    """The error of a reader, with the options of this command for the fields of a run."""
    text = str(error).removeprefix("data.sources: ")
    for name in ("text_column", "id_column", "meta_columns"):
        option = name.replace("meta_columns", "pair_column").replace("_", "-")
        text = text.replace(f"data.sources.{name}", f"--{option}")
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
