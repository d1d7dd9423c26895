"""Rows on which a model is measured: the beginning of some text, cut into rows of one length.

    texts --ids, one behind the other--> rows [T]     of which every eighth is kept to compare

Documents follow each other in a row without a boundary, as calibration sets of other tools have it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lmwright.config.run import Run
from lmwright.core.contract import Batch
from lmwright.data.rows.store import TokenStore
from lmwright.data.sources.columns import Bad
from lmwright.errors import UserError
from lmwright.evals.streamed import Texts, open_texts, own_words, refuse_columns
from lmwright.formats.loaded import LoadedModel

COMPARED = 8  # one row of so many is kept
BATCH_TOKENS = 2048
MOST_CHARS = 32  # read of one text, for each token that is measured


class Rows(NamedTuple):
    """Rows of ids, int32 [N, T]."""

    measured: np.ndarray
    compared: np.ndarray
    """Rows on which nothing is measured, to compare models on."""

    def batches(self) -> list[Batch]:
        """The measured rows in batches of one shape."""
        return list(_batches(self.measured))


def rows_of_text(
    loaded: LoadedModel, path: str, column: str | None, count: int, length: int
) -> Rows:
    """`count` rows to measure on, or as many as there are, and those to compare on. Raises
    UserError for a file that cannot be read or is too short."""
    texts = open_texts(path, column or "text", None, documents="file")
    refuse_columns(texts, path, {"--text-column": column})
    try:
        pieces = _ids_of_texts(loaded, texts, MOST_CHARS * count * length)
        return _cut(pieces, count, length, path)
    except UserError as error:
        raise own_words(error, texts.source) from None


def rows_of_run(run: Run, count: int, length: int) -> Rows:
    """`count` rows of what a run trains on, or as many as there are, and those to compare on."""
    store = TokenStore.open(run.data.dir)
    return _cut(_ids_of_store(store), count, length, str(run.data.dir))


def _cut(pieces: Iterator[np.ndarray], count: int, length: int, where: str) -> Rows:
    wanted = count + max(1, count // (COMPARED - 1))
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= wanted * length:
            break
    if size < 2 * length:
        raise UserError(
            f"{where}: has {size:,} tokens, and at least two rows of {length:,} are needed; give "
            "more text, or set --context"
        )
    rows = np.concatenate(found)[: size // length * length].reshape(-1, length)[:wanted]
    kept = np.arange(len(rows)) % COMPARED == min(COMPARED, len(rows)) - 1
    return Rows(rows[~kept], rows[kept])


def _ids_of_texts(loaded: LoadedModel, texts: Texts, most: int) -> Iterator[np.ndarray]:
    """Ids of each text, of one longer than `most` characters those of its beginning."""
    ends = loaded.tokenizer.eos_id
    after = [] if ends is None else [ends]
    for row in texts.rows():
        if not isinstance(row, Bad):
            ids = [*loaded.prompt_prefix, *loaded.tokenizer.encode(row.text[:most]), *after]
            yield np.asarray(ids, np.int32)


def _ids_of_store(store: TokenStore) -> Iterator[np.ndarray]:
    step = max(1, BATCH_TOKENS // store.seq_len)
    for start in range(0, store.epoch_rows, step):
        batch = store.batch(start, min(start + step, store.epoch_rows))
        yield batch["tokens"][batch["segment_ids"] > 0].astype(np.int32)


def _batches(rows: np.ndarray) -> Iterator[Batch]:
    size = max(1, BATCH_TOKENS // rows.shape[1])
    size = next(n for n in range(min(size, len(rows)), 0, -1) if len(rows) % n == 0)
    for start in range(0, len(rows), size):
        yield batch_of(rows[start : start + size])


def batch_of(tokens: np.ndarray) -> Batch:
    """Rows [B, T] of one text each."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return Batch(
        tokens=jnp.asarray(tokens),
        segment_ids=jnp.ones(tokens.shape, jnp.int32),
        positions=jnp.broadcast_to(places, tokens.shape),
        loss_weight=jnp.ones(tokens.shape, jnp.float32),
    )
