"""Predict: the class, the number, the tags or the answer of each row of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --classifier--> scores

Texts share rows as in training (`evals.documents`), and come out in the order of the file; an
interrupted command goes on where it was (`evals.streamed`).
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.sources.columns import Bad, Row, kind_of
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, row_compute, spread
from lmwright.evals.documents import Columns, Reader, of_documents
from lmwright.evals.questions import Questions
from lmwright.evals.set_tally import SetTally
from lmwright.evals.streamed import new_lines, open_texts, refuse_columns, write_lines
from lmwright.evals.tallies import ClassTally, NumberTally, Tally, refuse_threshold
from lmwright.evals.word_tags import WordTags
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import load_run
from lmwright.formats.tensor_hash import weights_hash
from lmwright.models.answerer import Answerer
from lmwright.models.classifier import Classifier
from lmwright.models.tagger import Tagger

SECOND = "text_pair"
"""Name of the column of second texts, where a run gives no other."""


class Predictor(Reader):
    """A classifier, ready for texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        compute: Compute,
        columns: Columns,
        threshold: float | None = None,
    ):
        if not isinstance(loaded.model, Classifier):
            raise UserError(
                f"{loaded.place}: is not a classifier; train one with objective.kind = 'classify' "
                "or 'regress' (docs/classification.md), a tagger with 'tag' (docs/tags.md), or a "
                "model that answers questions with 'answer' (docs/questions.md)"
            )
        super().__init__(loaded)
        self.model, self.weights = loaded.model, loaded.weights
        self.tally = tally_of(self.model, threshold)
        self._run = self.program(partial(_logits, self.model, compute))

    @classmethod
    def usable(cls, rows: Iterator[Row | Bad], columns: Columns) -> Iterator[Row | Bad]:
        """The rows, of which those with an empty text, or with a second one that is no text, cannot
        be used, as in training."""
        for row in rows:
            reason = _unusable(row, columns.pair) if isinstance(row, Row) else None
            yield Bad(row.number, reason, id=row.id) if reason else row

    def scores(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Raw scores float64 [N, K] of documents, lists of ids."""
        return of_documents(self._run, documents, self.most, max(1, len(self.model.labels)))


def _unusable(row: Row, pair: str | None) -> str | None:
    """The reason why a row cannot be used; None for a good one."""
    if not row.text.strip():
        return "its text is empty"
    second = json.loads(row.meta).get(pair) if pair else None
    if second is None or isinstance(second, str):
        return None
    return f"{pair!r} is {kind_of(second)}, not text"


def tally_of(model: Classifier, threshold: float | None) -> Tally:
    """A tally of what a classifier gives to texts. Raises UserError for a threshold that has no
    effect."""
    if model.per_text == "any":
        return SetTally(model.labels, threshold)
    refuse_threshold(threshold)
    return ClassTally(model.labels) if model.labels else NumberTally()


def tell_of_pairs(loaded: LoadedModel, option: str, there: Sequence[str] = ()) -> None:
    """Notes that second texts, which an `option` gives, are missing where a run learned from some,
    or where columns are `there` as those of pairs are called: results are others without them."""
    sources = load_run(loaded.path / "run.toml").data.sources if loaded.step is not None else ()
    named = [each.columns[SECOND] for each in sources if SECOND in each.columns]
    if named:
        told = f"{loaded.place} learned from pairs of texts (columns.{SECOND} = {named[0]!r})"
    elif SECOND in there:
        told = f"there is a column {SECOND!r}"
    else:
        return
    print(
        f"note: {told}, and texts are read alone; give their second ones by {option}",
        file=sys.stderr,
    )


def _logits(model: Classifier, compute: Compute, w: Tree, batch: Batch) -> Array:
    return model.classify(w, batch, compute)[0]


AnyPredictor = Predictor | WordTags | Questions
PREDICTORS: Mapping[type, type[AnyPredictor]] = {Answerer: Questions, Tagger: WordTags}
"""Classes that read rows for a kind of model that Predictor does not take."""


def predict_lines(
    predictor: AnyPredictor, rows: Iterator[Row | Bad], columns: Columns
) -> Iterator[list[str]]:
    """JSON lines of rows, a chunk at a time, in their order. Raises UserError for a label that is
    none of the model's."""
    tally, rows = predictor.tally, predictor.usable(rows, columns)
    while chunk := list(islice(rows, predictor.chunk)):
        good = [row for row in chunk if isinstance(row, Row)]
        metas = [json.loads(row.meta) for row in good]
        seconds = columns.pair and [meta.get(columns.pair) or "" for meta in metas]
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
                made |= {"id": row.id} if row.id is not None else {}
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
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    threshold: float | None = None,
    adapter: str | None = None,
    devices: int | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> int:
    """Writes the classes and the scores, the number, the tags or the answer of each row of a csv,
    tsv, jsonl or parquet file, or of each line of a txt file, as JSON lines to `out` or the
    terminal; returns 0. `devices` are those of `embed_command`.
    Raises UserError where the model does none of it, the file cannot be read, or `out` exists."""
    target = new_lines(out, overwrite)
    open_texts(file, text_column or "text", id_column)  # refuses what is not there at once
    compute = row_compute(precision, kernels)
    loaded = load_model(path, adapter, num_devices=devices, copies=True)
    compute = spread(compute, loaded.num_devices)
    form = PREDICTORS.get(type(loaded.model), Predictor)
    columns = Columns(pair_column or form.pair_column, label_column)
    named = {"--text-column": text_column, "--pair-column": pair_column}
    named |= {"--label-column": label_column, "--id-column": id_column}
    text_column = text_column or form.text_column
    texts = open_texts(file, text_column, id_column, tuple(filter(None, vars(columns).values())))
    if form.pair_column and any(each.format == "txt" for each in texts.files):
        raise UserError(
            f"{file}: has lines of text, and a question stands beside its context; give csv, tsv, "
            "jsonl or parquet"
        )
    refuse_columns(texts, file, named)
    predictor = form(loaded, compute, columns, threshold)
    if columns.pair is None and form is Predictor:
        tell_of_pairs(loaded, "--pair-column", texts.columns)
    tally = predictor.tally

    def lines(rows: Iterator[Row | Bad]) -> Iterator[list[str]]:
        return predict_lines(predictor, rows, columns)

    asked: dict[str, Any] = {"text_column": text_column, "id_column": id_column, **vars(columns)}
    asked |= {} if threshold is None else {"threshold": threshold}
    asked |= {"precision": precision, "kernels": kernels}
    asked |= {"model": weights_hash(predictor.weights)} if target else {}
    write_lines(texts, lines, tally, target, asked, overwrite=overwrite)
    console = Console(stderr=out is None, highlight=False)
    console.print(tally.line(predictor.most), markup=False, soft_wrap=True)
    if label_column is not None:
        tally.show(Path(file).name, compute, console)
    return 0
