"""Predict: the class of each text of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --classifier--> scores

Texts share rows as in training, and come out in the order of the file. What is written grows as
OUT.part beside OUT, where a run that was interrupted goes on, and takes the name OUT at the end.
"""

import json
import math
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
from lmwright.data.text.labeled import class_of, label_text
from lmwright.data.tokens.classes import joined, listed
from lmwright.errors import UserError
from lmwright.evals.classes import print_classes
from lmwright.evals.compute import Kernels, row_compute
from lmwright.evals.loss import SourceLoss
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.tensor_hash import weights_hash
from lmwright.formats.tokenizer_files import ids_around
from lmwright.guard.terminal import visible
from lmwright.models.classifier import Classifier

CHUNK = 1024  # texts that are packed together
BATCH_TOKENS = 8192
SHORTEST = 128  # tokens of a row
WORST = 5  # texts that are shown


@dataclass
class Tally:
    """Counts of what was predicted."""

    given: Counter = field(default_factory=Counter)
    """Texts by the class that they were given."""
    cut: int = 0
    """Texts longer than the model takes, of which the beginning was read."""
    bad: int = 0
    """Rows without a text."""
    pairs: Counter = field(default_factory=Counter)
    """Texts by the class that they have, where it is known, and the one that they were given."""
    nll: float = 0.0
    """Of these classes, summed."""
    worst: list[tuple[float, str, str, str]] = field(default_factory=list)
    """Least likely of these texts: score of the class, id, the class, the one given."""

    def add(self, made: Mapping[str, Any]) -> None:
        """Counts a line of what is written."""
        if "label" not in made:
            self.bad += 1
            return
        self.given[made["label"]] += 1
        self.cut += "cut" in made
        if (real := made.get("expected")) is not None:
            score = made["scores"][real]
            self.pairs[real, made["label"]] += 1
            self.nll -= math.log(max(score, 1e-300))
            worst = (score, made["id"], real, made["label"])
            self.worst = sorted([*self.worst, worst])[:WORST]

    def loss(self, labels: Sequence[str], name: str) -> SourceLoss:
        """Loss and confusion matrix of the texts whose class is known."""
        confusion = np.array([[self.pairs[a, b] for b in labels] for a in labels], np.float64)
        count = max(self.pairs.total(), 1)
        right = float(np.trace(confusion)) / count
        return SourceLoss(name, self.nll / count, right, count, 0, confusion=confusion)

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
    labels = predictor.model.labels
    while chunk := list(islice(rows, CHUNK)):
        good = [row for row in chunk if isinstance(row, Row)]
        metas = [json.loads(row.meta) for row in good]
        seconds = columns.pair and [str(meta.get(columns.pair) or "") for meta in metas]
        documents, cut = predictor.encode([row.text for row in good], seconds)
        real = [
            _expected(row, meta, columns, labels) for row, meta in zip(good, metas, strict=True)
        ]
        found = iter(zip(predictor.scores(documents), cut, real, strict=True))
        lines = []
        for row in chunk:
            made: dict[str, Any] = {"row": row.number}
            if isinstance(row, Bad):
                made["error"] = row.reason
            else:
                each, was_cut, expected = next(found)
                scored = {k: float(f"{v:.6g}") for k, v in zip(labels, each, strict=True)}
                made |= {"id": row.id, "label": labels[int(each.argmax())], "scores": scored}
                made |= {"cut": True} if was_cut else {}
                made |= {"expected": expected} if expected is not None else {}
            tally.add(made)
            lines.append(json.dumps(made, ensure_ascii=False) + "\n")
        yield lines


def _expected(
    row: Row, meta: Mapping[str, Any], columns: Columns, labels: Sequence[str]
) -> str | None:
    """The class that a row says it has. Raises UserError for one that is none of the model's."""
    if columns.label is None:
        return None
    label = label_text(meta.get(columns.label))
    number = class_of(label, labels)
    if number is None:
        raise UserError(
            f"{row.id}: {columns.label} {label[:80]!r} is not one of the model's classes "
            f"{listed(labels)}; correct the row, or leave --label-column out"
        )
    return labels[number]


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
    """Writes the class and the scores of each row of a csv, tsv, jsonl or parquet file, or of each
    line of a txt file, as JSON lines to `out` or the terminal; returns 0. Raises UserError where
    the model is no classifier, the file cannot be read, or `out` exists."""
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
    tally = Tally()

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
    labels = predictor.model.labels
    console.print(tally.line(labels, predictor.most), markup=False, soft_wrap=True)
    if label_column is not None:
        print_classes([tally.loss(labels, Path(file).name)], labels, compute, console)
        for score, id_, real, given in tally.worst:
            line = f"least likely: {id_}, {real} at {score:.2%}, was given {given}"
            console.print(visible(line, lines=False), markup=False, soft_wrap=True)
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
