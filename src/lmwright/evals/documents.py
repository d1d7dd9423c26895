"""Documents: texts as packed rows, several in each, for models that read whole texts.

    texts --encode, cut--> documents --pack--> rows [B, T] --model--> results [B, S, K]

Texts share rows as in training, and results come in the order of the texts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from lmwright.core.contract import Batch
from lmwright.core.copies import computing_with, dealt, num_copies_of, on_each, stacked
from lmwright.core.param import Tree
from lmwright.data.json_text import parse_json
from lmwright.data.rows.best_fit import best_fit_rows
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.tokens.around import ids_around, ids_between
from lmwright.data.tokens.classes import joined
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.proof import finite
from lmwright.formats.sentence import TOKENIZER

BATCH_TOKENS = 8192
CHUNK = 1024  # texts that are packed together, for each device
SHORTEST = 128  # tokens of a row


@dataclass(frozen=True)
class Columns:
    """Columns beside that of the texts."""

    pair: str | None = None
    label: str | None = None


class Reader:
    """Encodes texts as a model's training did."""

    text_column: ClassVar[str] = "text"
    """Column of the texts unless another one is named."""
    pair_column: ClassVar[str | None] = None
    """Column of their second texts unless another one is named."""
    weights: Tree

    def __init__(self, loaded: LoadedModel):
        self.tokenizer = loaded.tokenizer
        self.around = ids_around(self.tokenizer)
        if loaded.prefix is not None:  # a run's own, whatever its tokenizer's file says
            self.around = (loaded.prefix, loaded.suffix)
        self.between = ids_between(self.tokenizer, *self.around)
        self.side = truncation_side(loaded.tokenizer_dir, self.tokenizer)
        """Side at which longer texts are cut, "right" or "left"."""
        self.most: int = loaded.model.seq_len
        """Tokens that the model takes."""

    @property
    def chunk(self) -> int:
        """Texts that are packed together, so that all devices have work."""
        return CHUNK * num_copies_of(self.weights)

    def program(self, fn: Callable[[Tree, Batch], Array]) -> "RowProgram":
        """`fn(w, batch)` of one device as a program for batches on all that have the weights."""
        run = jax.jit(on_each(fn))

        def each(batches: Batch) -> Array:
            with computing_with(self.weights):
                found: Array = run(self.weights, batches)
            return found

        return RowProgram(each, num_copies_of(self.weights))

    @classmethod
    def usable(cls, rows: Iterator[Row | Bad], columns: Columns) -> Iterator[Row | Bad]:
        """The rows, of which those cannot be used that lack something."""
        return rows

    def encode(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of each text, with its second one if there are any, as in training, and whether they
        were cut to what the model takes."""
        before, after = self.around
        parts = [self.tokenizer.encode_batch(each) for each in (texts, seconds) if each is not None]
        # as in training, an empty second text is none
        rows = ([first, *filter(None, rest)] for first, *rest in zip(*parts, strict=True))
        fitted = [
            joined(row, self.most, before, after, self.between, side=self.side) for row in rows
        ]
        # a text that no token stands for is one token all the same
        end = [self.tokenizer.eos_id or 0]
        return [[*before, *ids, *after] or end for ids, _ in fitted], [cut for _, cut in fitted]


def truncation_side(folder: Path | None, tokenizer: TextTokenizer) -> str:
    """Side at which transformers cuts the texts of a tokenizer's folder."""
    path = folder and folder / TOKENIZER
    said = parse_json(path) if path and path.exists() else {}
    said = said if isinstance(said, dict) else {}
    side = said.get("truncation_side") or (tokenizer.backend.truncation or {}).get("direction")
    return "left" if str(side).lower() == "left" else "right"


class RowProgram(NamedTuple):
    """A program that gives results [N, B, ...] of N batches of packed rows."""

    program: Callable[[Batch], ArrayLike]
    num_copies: int
    """N, of which each device computes one."""

    def each(
        self, batches: Iterator[tuple[Batch, dict[int, "DocumentPlace"]]]
    ) -> Iterator[tuple[np.ndarray, dict[int, "DocumentPlace"]]]:
        """Results [B, ...] of each batch, and the places of documents in it. The next batches are
        packed while devices compute."""

        def results() -> Iterator[tuple[ArrayLike, list[dict[int, DocumentPlace]]]]:
            for group, filled in dealt(batches, self.num_copies):
                found = self.program(stacked([batch for batch, _ in filled]))
                yield found, [places for _, places in group]

        computing = results()
        before = next(computing, None)
        while before is not None:
            (found, places), before = before, next(computing, None)
            yield from zip(np.asarray(found, np.float64), places, strict=False)


def of_documents(
    run: RowProgram,
    documents: Sequence[Sequence[int]],
    most: int,
    size: int,
    room: int = 1,
) -> np.ndarray:
    """Results float64 [N, `size`] of documents, lists of at most `most` ids: `run` gives those
    [B, S, `size`] of packed rows. In a row of T tokens are at most T / `room` documents. Raises
    UserError for results that are not finite."""
    found = np.zeros((len(documents), size))
    for results, places in run.each(_batches(documents, most, room)):
        for number, at in places.items():
            found[number] = finite(results[at.row, at.number], "results")
    return found


def of_tokens(run: RowProgram, documents: Sequence[Sequence[int]], most: int) -> list[np.ndarray]:
    """Results float64 [tokens, K] of each document, a list of at most `most` ids: `run` gives those
    [B, T, K] of packed rows. Raises UserError for results that are not finite."""
    found: list[np.ndarray] = [np.zeros(0)] * len(documents)
    for results, places in run.each(_batches(documents, most, 1)):
        for number, at in places.items():
            found[number] = finite(results[at.row, at.tokens], "results")
    return found


class DocumentPlace(NamedTuple):
    """Position of a document in a batch."""

    row: int
    number: int
    """Number of documents before it in its row."""
    tokens: slice


def _batches(
    documents: Sequence[Sequence[int]], most: int, room: int
) -> Iterator[tuple[Batch, dict[int, DocumentPlace]]]:
    """Batches of packed rows, and the places of the documents in them."""
    lengths = np.array([len(ids) for ids in documents], np.int64)
    width = SHORTEST
    while width < lengths.max(initial=1):
        width *= 2
    width = min(width, most)
    rows = best_fit_rows(np.minimum(np.maximum(lengths, room), width), width)
    count = max(1, BATCH_TOKENS // width)
    for start in range(0, int(rows.max(initial=-1)) + 1, count):
        yield rows_of(documents, rows, start, count, width)


def rows_of(
    documents: Sequence[Sequence[int]], rows: np.ndarray, start: int, size: int, width: int
) -> tuple[Batch, dict[int, DocumentPlace]]:
    """Rows start..start+size-1, padded to that many, and the place of each document in them."""
    tokens, ids, positions = (np.zeros((size, width), np.int32) for _ in range(3))
    filled, count = np.zeros(size, int), np.zeros(size, int)
    places = {}
    for number in np.flatnonzero((rows >= start) & (rows < start + size)).tolist():
        row, length = int(rows[number]) - start, len(documents[number])
        here = slice(filled[row], filled[row] + length)
        places[number] = DocumentPlace(row, int(count[row]), here)
        count[row] += 1
        tokens[row, here], ids[row, here] = documents[number], count[row]
        positions[row, here] = np.arange(length)
        filled[row] += length
    return Batch(tokens, ids, positions, np.zeros((size, width), np.float32)), places
