"""Record: one packed row on disk, and the batch arrays derived from it.

    tokens [T] | starts: a bit for each token that begins a segment | length | text_bytes
              [| learned: a bit for each token that is to be predicted]
              [| labels [T]: at the first token of a segment, its number or that of its class]

A segment is a document or a piece of one. Ids and positions are not stored: they follow
from the starts at about a nanosecond a token.
"""

import functools
from typing import Literal

import numpy as np

Attention = Literal["document", "row"]


def row_dtype(
    seq_len: int, token_dtype: str, masked: bool = False, labeled: bool = False
) -> np.dtype:
    """Fixed-size record of a row of `seq_len` tokens, little-endian, without padding bytes.

    length: tokens that are not padding. text_bytes: utf-8 bytes of the documents' share in
    this row, first tokens included; over all rows they sum to the documents' bytes. masked:
    some tokens are only read, as prompts are, and never predicted. labeled: each segment has a
    label, a number.
    """
    fields = [
        ("tokens", np.dtype(token_dtype).newbyteorder("<"), (seq_len,)),
        ("starts", "u1", ((seq_len + 7) // 8,)),
        ("length", "<u4"),
        ("text_bytes", "<u4"),
    ]
    if masked:
        fields.append(("learned", "u1", ((seq_len + 7) // 8,)))
    if labeled:
        fields.append(("labels", "<f4", (seq_len,)))
    return np.dtype(fields)


def unpack_rows(
    rows: np.ndarray, attention: Attention = "document", *, rated: bool = False
) -> dict[str, np.ndarray]:
    """Arrays of a batch from records [B]; all [B, T].

    tokens int32; segment_ids int32, 0 padding, from 1 in each row; positions int32, restart
    at each segment; loss_weight float32, 0 for padding, for tokens that are not learned and for
    the first token of a segment, which nothing before it predicts; of `rated` rows, that token's
    is 1 where the answer was liked. Of labeled rows it is the label at the first token of a
    segment, 0 at all others, of tagged ones the number of a tag plus 1 at the first token of each
    word; of related ones, unpacked as `rated`, it is 1 at the first token of an
    anchor. attention="row" takes the whole row as one segment.
    """
    tokens = rows["tokens"].astype(np.int32)  # [B, T]
    B, T = tokens.shape
    if attention == "row":
        first = np.arange(0, B * T, T, dtype=np.int32)  # [B]
    else:
        starts = np.unpackbits(rows["starts"], axis=1, count=T, bitorder="little")
        starts[:, 0] = 1  # also in rows that are all padding
        first = np.flatnonzero(starts.view(bool)).astype(np.int32)  # [segments]
    sizes = np.full(len(first), B * T, np.int64)
    sizes[:-1] = first[1:]
    sizes -= first
    positions = np.repeat(first, sizes)
    np.subtract(_counting(B * T), positions, out=positions)
    number = np.arange(1, len(first) + 1, dtype=np.int32)
    number -= np.searchsorted(first, first - first % T).astype(np.int32)
    weight = np.ones((B, T), np.float32)
    if "learned" in rows.dtype.names:
        learned = np.unpackbits(rows["learned"], axis=1, count=T, bitorder="little")
        weight = learned.astype(np.float32)
    labeled = "labels" in rows.dtype.names
    if labeled:
        weight = rows["labels"].astype(np.float32)
    batch = {
        "tokens": tokens,
        "segment_ids": np.repeat(number, sizes).reshape(B, T),
        "positions": positions.reshape(B, T),
        "loss_weight": weight,
    }
    if not (rated or labeled):
        batch["loss_weight"].reshape(-1)[first] = 0
    lengths = rows["length"]
    for b in np.flatnonzero(lengths < T):
        for name in ("segment_ids", "positions", "loss_weight"):
            batch[name][b, lengths[b] :] = 0
    return batch


def mask_predicted(
    batch: dict[str, np.ndarray], *, pairs: bool = False, rated: bool = False
) -> np.ndarray:
    """Mask bool [B, T] of the tokens whose loss is measured. Of pairs (alternating segments) these
    are the chosen answer's, of rated answers the liked ones'."""
    predicted = (batch["loss_weight"] > 0) & (batch["positions"] > 0)
    if pairs:
        predicted &= batch["segment_ids"] % 2 == 1
    if rated:
        first = batch["positions"] == 0
        at = np.maximum.accumulate(np.where(first, np.arange(first.shape[1]), 0), axis=1)
        predicted &= np.take_along_axis(batch["loss_weight"], at, axis=1) > 0
    return predicted


@functools.lru_cache(4)
def _counting(size: int) -> np.ndarray:
    numbers = np.arange(size, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers
