"""Predict: the class of each text of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --classifier--> scores

Texts share rows as in training (`evals.documents`), and come out in the order of the file; an
interrupted command goes on where it was (`evals.streamed`).
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.text.labeled import class_of, label_text
from lmwright.data.tokens.classes import listed
from lmwright.errors import UserError
from lmwright.evals.classes import print_classes
from lmwright.evals.compute import Kernels, row_compute
from lmwright.evals.documents import Reader, of_documents
from lmwright.evals.loss import SourceLoss
from lmwright.evals.streamed import CHUNK, open_texts, refuse_existing, write_lines
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.tensor_hash import weights_hash
from lmwright.guard.terminal import visible
from lmwright.models.classifier import Classifier

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


class Predictor(Reader):
    """A classifier, ready for texts."""

    def __init__(self, loaded: LoadedModel, compute: Compute):
        if not isinstance(loaded.model, Classifier):
            raise UserError(
                f"{loaded.path}: is no classifier; train one with objective.kind = 'classify' "
                "(docs/classification.md)"
            )
        super().__init__(loaded)
        self.model, self.weights = loaded.model, loaded.weights
        self._run = jax.jit(partial(_logits, self.model, compute))

    def scores(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Probabilities float64 [N, K] of documents, lists of ids."""
        run = partial(self._run, self.weights)
        found = of_documents(run, documents, self.most, len(self.model.labels))
        found = np.exp(found - found.max(1, keepdims=True))
        return found / found.sum(1, keepdims=True)


def _logits(model: Classifier, compute: Compute, w: Tree, batch: Batch) -> Array:
    return model.classify(w, batch, compute)[0]


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
    target = Path(out) if out is not None else None
    refuse_existing(target, overwrite)
    columns = Columns(pair_column, label_column)
    beside = tuple(filter(None, (pair_column, label_column)))
    texts = open_texts(file, text_column, id_column, beside)
    compute = row_compute(precision, kernels)
    predictor = Predictor(load_model(path, adapter), compute)
    tally = Tally()

    def lines(rows: Iterator[Row | Bad]) -> Iterator[list[str]]:
        return predict_lines(predictor, rows, tally, columns)

    asked: dict[str, Any] = {"text_column": text_column, "id_column": id_column, **vars(columns)}
    asked |= {"model": weights_hash(predictor.weights)} if target else {}
    write_lines(texts, lines, tally, target, asked)
    console = Console(stderr=out is None, highlight=False)
    labels = predictor.model.labels
    console.print(tally.line(labels, predictor.most), markup=False, soft_wrap=True)
    if label_column is not None:
        print_classes([tally.loss(labels, Path(file).name)], labels, compute, console)
        for score, id_, real, given in tally.worst:
            line = f"least likely: {id_}, {real} at {score:.2%}, was given {given}"
            console.print(visible(line, lines=False), markup=False, soft_wrap=True)
    return 0
