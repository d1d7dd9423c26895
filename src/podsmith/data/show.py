"""Rows of a store as text, for a person to look at before anything is trained on them."""

from collections.abc import Iterator

import numpy as np

from podsmith.data.record import unpack_rows
from podsmith.data.store import TokenStore
from podsmith.data.tokenizer import load_tokenizer
from podsmith.errors import UserError


def show_command(data_dir: str, start: int = 0, count: int = 3) -> None:
    """Prints rows start..start+count-1 of the first epoch, in the order of training."""
    store = TokenStore.open(data_dir)
    if start >= store.epoch_rows:
        raise UserError(f"{data_dir}: has {store.epoch_rows} rows; --start {start} is past them")
    tokenizer = load_tokenizer(store.tokenizer_dir)
    stop = min(start + count, store.epoch_rows)
    print(f"{data_dir}: {store.epoch_rows:,} rows of {store.seq_len} tokens an epoch")
    for number, record in enumerate(store.records(start, stop), start):
        pieces = list(row_pieces(record))
        tokens = sum(map(len, pieces))
        print(f"\nrow {number}: {tokens} tokens, {store.seq_len - tokens} padding")
        for place, ids in enumerate(pieces, 1):
            print(f"  document {place}, {len(ids)} tokens: {tokenizer.decode(ids)!r}")


def row_pieces(record: np.void) -> Iterator[list[int]]:
    """Token ids of each document, or piece of one, in a packed row; without the padding."""
    row = unpack_rows(record[None])  # [1, T]
    segments = row["segment_ids"][0]
    for segment in range(1, int(segments.max()) + 1):
        yield row["tokens"][0][segments == segment].tolist()
