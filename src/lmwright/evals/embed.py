"""Embed: the vector of each text of a file, streamed.

    file --rows--> texts --encode, cut--> documents --pack--> rows [B, T] --embedder--> vectors

Texts share rows (`evals.documents`), and vectors come out in the order of the file; an interrupted
command goes on where it was (`evals.streamed`). The ending of OUT is its format (`evals.vectors`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np
from rich.console import Console

from lmwright.config.rows import TOKENS_PER_TEXT
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.data.sources.columns import Bad, Row
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, row_compute, spread
from lmwright.evals.documents import Reader, of_documents
from lmwright.evals.streamed import JSONL, new_file, open_texts, refuse_columns, write_lines
from lmwright.evals.vectors import finisher, line_of
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.tensor_hash import weights_hash
from lmwright.guard.terminal import visible
from lmwright.models.embedder import Embedder, Length, TokenPooling, embedder_of


@dataclass
class VectorTally:
    """Counts of texts."""

    given: int = 0
    """Number of texts with a vector."""
    cut: int = 0
    """Number of texts longer than the model takes, of which the beginning was read."""
    bad: int = 0
    """Number of rows without a text."""

    def add(self, made: Mapping[str, Any]) -> None:
        """Counts a line of what is written."""
        self.bad += "error" in made
        self.given += "error" not in made
        self.cut += "cut" in made

    def line(self, dim: int, most: int) -> str:
        """The counts as a sentence."""
        notes = [f"{self.given:,} vectors of {dim:,} numbers"]
        notes += [f"{self.cut:,} texts cut to {most:,} tokens"] if self.cut else []
        notes += [f"{self.bad:,} rows without a text"] if self.bad else []
        return visible("; ".join(notes), lines=False)


class Vectors(Reader):
    """An encoder that gives vectors, ready for texts."""

    def __init__(
        self, loaded: LoadedModel, model: Embedder, dim: int | None, compute: Compute,
        prompt: str | None = None,
    ):  # fmt: skip
        super().__init__(loaded)
        self.prompt = prompt_of(model, prompt, loaded.place)
        """Text put before each text."""
        self.model, self.dim = model, model.embed_dim if dim is None else dim
        if not 1 <= self.dim <= model.embed_dim:
            raise UserError(
                f"--dim: {dim} is not between 1 and {model.embed_dim}, the numbers of a vector of "
                f"{loaded.place}"
            )
        self.weights = model.without_head(loaded.weights)
        self._run = self.program(partial(_vectors, model, compute))

    def of(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors float32 [N, dim] of documents, lists of ids."""
        size = self.model.embed_dim
        found = of_documents(self._run, documents, self.most, size, TOKENS_PER_TEXT)[:, : self.dim]
        if self.model.length == "one":
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found.astype(np.float32)


def _vectors(model: Embedder, compute: Compute, w: Tree, batch: Batch) -> jax.Array:
    places = max(1, batch.tokens.shape[1] // TOKENS_PER_TEXT)
    return model.vectors(w, batch, compute, places)[0]


def embed_lines(
    vectors: Vectors, rows: Iterator[Row | Bad], tally: VectorTally, form: str
) -> Iterator[list[str]]:
    """JSON lines of rows, a chunk at a time, in their order."""
    while chunk := list(islice(rows, vectors.chunk)):
        good = [row for row in chunk if isinstance(row, Row)]
        documents, cut = vectors.encode([vectors.prompt + row.text for row in good])
        found = iter(zip(vectors.of(documents), cut, strict=True))
        lines = []
        for row in chunk:
            made: dict[str, Any] = {"row": row.number}
            if isinstance(row, Bad):
                made |= {"id": row.id} if row.id is not None else {}
                made["error"], vector = row.reason, None
            else:
                vector, was_cut = next(found)
                made |= {"id": row.id} | ({"cut": True} if was_cut else {})
            tally.add(made)
            lines.append(line_of(made, vector, form))
        yield lines


def prompt_of(model: Embedder, name: str | None, where: str) -> str:
    """The prompt of a name, or the model's default one; may be empty. Raises UserError for a name
    that the model does not have."""
    there = dict(model.prompts)
    if name is not None and name not in there:
        cure = f"choose {' or '.join(map(repr, there))}" if there else "it has none; leave it out"
        raise UserError(f"--prompt: {where} has no prompt {name!r}; {cure}")
    return there.get(name or model.default_prompt or "", "")


def embedder_at(
    loaded: LoadedModel, pooling: TokenPooling | None, length: Length | None
) -> Embedder:
    """The model of a place as one that gives vectors: as it says itself, or else means of hidden
    states as they are. Raises UserError for a model that is no encoder."""
    try:
        return embedder_of(loaded.model, pooling, length)
    except UserError as error:
        raise UserError(f"{loaded.place}: {error}") from None


def embed_command(
    path: str,
    file: str,
    *,
    out: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    pooling: TokenPooling | None = None,
    length: Length | None = None,
    dim: int | None = None,
    prompt: str | None = None,
    adapter: str | None = None,
    devices: int | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> int:
    """Writes the vector of each row of a csv, tsv, jsonl or parquet file, or of each line of a txt
    file, to `out` (.jsonl, .npy, .npz or .parquet) or as JSON lines to the terminal; returns 0.

    `dim` keeps the first numbers of each, `length` one scales them, afterwards; `prompt` names one
    of the model's, which is put before each text. `devices` of this machine compute rows of their
    own, or share weights that one has no memory for: with None all. Raises UserError
    where the model is no encoder, the file cannot be read, or `out` exists or has another ending.
    """
    target = new_file(out, overwrite)
    form = JSONL if target is None else target.suffix
    finish = finisher(form, out)
    texts = open_texts(file, text_column or "text", id_column)
    refuse_columns(texts, file, {"--text-column": text_column, "--id-column": id_column})
    loaded = load_model(path, adapter, num_devices=devices, copies=True)
    model = embedder_at(loaded, pooling, length)
    compute = spread(row_compute(precision, kernels), loaded.num_devices)
    vectors = Vectors(loaded, model, dim, compute, prompt)
    tally = VectorTally()

    def lines(rows: Iterator[Row | Bad]) -> Iterator[list[str]]:
        return embed_lines(vectors, rows, tally, form)

    asked: dict[str, Any] = {"text_column": text_column or "text", "id_column": id_column}
    asked |= {"pooling": model.pooling, "length": model.length, "dim": vectors.dim, "form": form}
    asked |= {"prompt": vectors.prompt} if vectors.prompt else {}
    asked |= {"precision": precision, "kernels": kernels}
    asked |= {"model": weights_hash(vectors.weights)} if target else {}
    write_lines(texts, lines, tally, target, asked, partial(finish, vectors.dim), overwrite)
    console = Console(stderr=out is None, highlight=False)
    console.print(tally.line(vectors.dim, vectors.most), markup=False, soft_wrap=True)
    return 0
