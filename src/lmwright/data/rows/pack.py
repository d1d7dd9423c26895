"""Pack: documents to rows of exactly T tokens.

    chunk     |aaaaabb|bbbbbbb|bccccdd|    one stream, cut every T tokens; only the end is padded
    best-fit  |aaaaabb|ccccee.|dddddd.|    each document whole, in the fullest row that has room

Best-fit decreasing (Ding et al. 2024, https://arxiv.org/abs/2404.10830) works on a bounded
window of documents at a time; a document longer than T is cut first. Every piece is a
segment of its own. One shard of rows is one part of the stage.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.config.check_data import refuse_splitting
from lmwright.config.rows import TOKENS_PER_TEXT
from lmwright.config.run import Pack
from lmwright.data.dropped import read_dropped, read_made
from lmwright.data.manifest import Manifest, add_counts, refuse_altered
from lmwright.data.progress import Progress
from lmwright.data.rows.best_fit import best_fit_rows
from lmwright.data.rows.lengths import why_empty
from lmwright.data.rows.record import row_dtype
from lmwright.data.stage import run_stage
from lmwright.data.text.chat_encode import BEGINS, LEARNED, LIKED
from lmwright.data.tokens.answers import gather_questions
from lmwright.data.tokens.facts import BESIDE
from lmwright.errors import UserError

SHARD_TOKENS = 1 << 26
WINDOW_TOKENS = 1 << 24
WINDOW_DOCS = 1 << 18
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenFile:
    """One token file of a source, with its place in the source's stream."""

    path: str
    """`....tokens.bin`; the documents' table lies beside it as `....docs.npy`."""
    start: int
    tokens: int
    hashes: tuple[tuple[str, str], ...]
    """Path and xxh3_128 of it and of each file beside it."""


@dataclass(frozen=True)
class Shard:
    """One part: the rows made from the tokens (chunk) or documents in start..stop-1."""

    split: str
    source: str
    number: int
    method: str
    seq_len: int
    dtype: str
    pad_id: int
    start: int
    stop: int
    files: tuple[TokenFile, ...]
    masked: bool = False
    """Beside each `.tokens.bin` lies a `.learned.bin`."""
    labeled: bool = False
    """Beside each `.tokens.bin` lies a `.classes.npy`, and no document is longer than a row."""
    related: bool = False
    """Documents are groups of texts, which take the room of TOKENS_PER_TEXT each at least."""
    tagged: bool = False
    """What is labeled are words: beside each `.tokens.bin` lies a `.tags.bin`."""


@dataclass(frozen=True)
class Window:
    """Part of the stream of a source, from token `start` on."""

    start: int
    tokens: np.ndarray
    marks: np.ndarray | None
    """uint8, as `chat_encode.Example` has them; None: all are learned."""
    tags: np.ndarray | None = None
    """uint16: 0, or the number of the tag of the word that begins there plus 1."""


@dataclass(frozen=True)
class Pieces:
    """Documents or pieces of them, sorted by row; int64 [P] each."""

    start: np.ndarray  # in the source's stream, tokens
    length: np.ndarray
    text_bytes: np.ndarray
    row: np.ndarray  # does not fall
    label: np.ndarray | None = None  # float32


def pack_tokens(
    data_dir: str | Path,
    *,
    seq_len: int,
    pack: Pack,
    workers: int | None = None,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
    rows: Mapping[str, int] | None = None,
) -> Manifest:
    """Packs `<data_dir>/tokenize` into `<data_dir>/pack`, rows of `seq_len` tokens; of the training
    text of each source the first `rows`, if given.

    Files: `<split>/<source>/shard-00000.bin`, records of `record.row_dtype`. Facts: what is
    needed to read them, and `efficiency` (real tokens / slots) per split and source.
    Raises UserError if the tokenized data is missing, damaged or empty.
    """
    data_dir = Path(data_dir)
    tokenized = read_made(data_dir / "tokenize")
    if read_dropped(data_dir / "tokenize") is None:
        tokenized.check_sizes()
    wanted = {"method": pack.method, "seq_len": seq_len, "attention": pack.attention}
    wanted |= {"shard_tokens": shard_tokens}
    wanted |= {} if rows is None else {"rows": dict(rows)}
    shards = plan_shards(tokenized, pack.method, seq_len, shard_tokens, rows)
    if not shards:
        raise UserError(f"{data_dir}/tokenize holds no tokens: {why_empty(tokenized)}")
    copied = ("dtype", "vocab_size", "eos_id", "tokenizer_fingerprint")
    facts = {k: tokenized.facts[k] for k in copied}
    facts |= {name: tokenized.facts.get(name, False) for name in ("masked", "pairs", "rated")}
    facts |= {name: value for name, value in tokenized.facts.items() if name in BESIDE}
    if facts["masked"] or "labels" in facts:
        refuse_splitting(pack)

    def report(counts: Sequence[dict[str, Any]], temp: Path) -> dict[str, Any]:
        gather_questions(tokenized, temp)
        splits = functools.reduce(add_counts, counts, {})["sources"]
        return {
            "efficiency": {
                split: {n: c["tokens"] / max(c["rows"] * seq_len, 1) for n, c in sources.items()}
                for split, sources in splits.items()
            }
        }

    return run_stage(
        "pack",
        data_dir / "pack",
        shards,
        pack_shard,
        fingerprint=wanted,
        inputs={"tokenize": tokenized},
        facts=facts | wanted,
        finish=report,
        workers=workers,
        progress=progress,
    )


def plan_shards(
    tokenized: Manifest,
    method: str,
    seq_len: int,
    shard_tokens: int,
    rows: Mapping[str, int] | None = None,
) -> tuple[Shard, ...]:
    """Splits the stream of every source into shards; depends on sizes only."""
    dtype = np.dtype(tokenized.facts["dtype"])
    streams: dict[tuple[str, str], list[TokenFile]] = {}
    beside: dict[str, list[tuple[str, str]]] = {}
    for name, entry in sorted(tokenized.files.items()):
        path = str(Path(tokenized.folder) / name)
        beside.setdefault(_stem(name), []).append((path, entry["xxh3_128"]))
    for name in sorted(n for n in tokenized.files if n.endswith(".tokens.bin")):
        split, *source, _ = name.split("/")
        tokens = tokenized.files[name]["bytes"] // dtype.itemsize
        files = streams.setdefault((split, "/".join(source)), [])
        start = files[-1].start + files[-1].tokens if files else 0
        if tokens:
            path = str(Path(tokenized.folder) / name)
            files.append(TokenFile(path, start, tokens, tuple(beside[_stem(name)])))
    step = max(1, shard_tokens // seq_len) * seq_len
    shards = []
    for (split, source), files in streams.items():
        size = files[-1].start + files[-1].tokens if files else 0
        if rows is not None and split == "train":
            size = _first_rows(size, rows[source], seq_len, f"{tokenized.folder}: {source}")
        for number, start in enumerate(range(0, size, step)):
            stop = min(start + step, size)
            touched = tuple(f for f in files if f.start < stop and start < f.start + f.tokens)
            pad_id = tokenized.facts["eos_id"] or 0  # padding is masked, whatever it is
            shape = (number, method, seq_len, dtype.name, pad_id, start, stop)
            facts = tokenized.facts
            kinds = facts.get("masked", False), "labels" in facts, facts.get("related", False)
            kinds = *kinds, facts.get("tagged", False)
            shards.append(Shard(split, source, *shape, touched, *kinds))
    return tuple(shards)


def _stem(name: str) -> str:
    """Name of a part's file without its ending."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.split('.')[0]}"


def _first_rows(size: int, rows: int, seq_len: int, what: str) -> int:
    """Tokens of the first rows of a stream of `size` tokens. Raises UserError for a shorter one."""
    if size < rows * seq_len:
        raise UserError(
            f"{what}: {size:,} tokens do not fill the {rows:,} rows that were declared; remove the "
            "folder and prepare again"
        )
    return rows * seq_len


def pack_shard(shard: Shard, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: writes the shard's file and returns its counts."""
    stream = _Stream(shard)
    windows = _chunk(stream, shard) if shard.method == "chunk" else _best_fit(stream, shard)
    path = tmp_dir / shard.split / shard.source / f"shard-{shard.number:05d}.bin"
    path.parent.mkdir(parents=True)
    rows = tokens = text_bytes = segments = max_id = 0
    with open(path, "wb") as f:
        for window, pieces in windows:
            for block in _build(window, pieces, shard):
                f.write(block.view(np.uint8))  # tofile has no errno when the disk is full
                rows += len(block)
                max_id = max(max_id, int(block["tokens"].max()))
            tokens += int(pieces.length.sum())
            text_bytes += int(pieces.text_bytes.sum())
            segments += len(pieces.length)
    if not rows:
        path.unlink()
    entry = {"rows": rows, "tokens": tokens, "text_bytes": text_bytes, "segments": segments}
    return {"sources": {shard.split: {shard.source: entry}}, "max_id": max_id}


class _Stream:
    """The tokens and documents of a shard's files, by place in the source's stream."""

    def __init__(self, shard: Shard):
        self.files, self.masked, self.tagged = shard.files, shard.masked, shard.tagged
        self.dtype = np.dtype(shard.dtype).newbyteorder("<")
        starts, ends, sizes, labels = [], [], [], []
        for file in shard.files:
            for path, wanted in file.hashes:
                refuse_altered(path, wanted)
            table = np.load(file.path.removesuffix(".tokens.bin") + ".docs.npy", mmap_mode="r")
            if not len(table) or table[-1, 0] != file.tokens:
                raise UserError(
                    f"{file.path} and its .docs.npy do not match; remove the folder of the "
                    "tokenize stage and prepare again"
                )
            # only documents that touch the shard
            lo = np.searchsorted(table[:, 0], shard.start - file.start, side="right")
            hi = np.searchsorted(table[:, 0], shard.stop - file.start) + 1
            end = table[lo:hi, 0] + file.start
            before = file.start + (table[lo - 1, 0] if lo else 0)
            starts.append(np.concatenate([[before], end[:-1]]))
            ends.append(end)
            sizes.append(table[lo:hi, 1])
            if shard.labeled and not shard.tagged:
                beside = file.path.removesuffix(".tokens.bin") + ".classes.npy"
                labels.append(np.load(beside)[lo:hi])
        self.starts, self.ends, self.text_bytes = map(np.concatenate, (starts, ends, sizes))
        self.labels = np.concatenate(labels) if labels else None

    def read(self, start: int, stop: int) -> Window:
        """Tokens start..stop-1; a view if they lie in a single file."""
        marks = self._read(start, stop, ".learned.bin", np.uint8) if self.masked else None
        tags = self._read(start, stop, ".tags.bin", "<u2") if self.tagged else None
        return Window(start, self._read(start, stop, ".tokens.bin", self.dtype), marks, tags)

    def _read(self, start: int, stop: int, ending: str, dtype: Any) -> np.ndarray:
        views = []
        for file in self.files:
            a, b = max(start, file.start), min(stop, file.start + file.tokens)
            if a < b:
                path = file.path.removesuffix(".tokens.bin") + ending
                views.append(np.memmap(path, dtype, mode="r")[a - file.start : b - file.start])
        return views[0] if len(views) == 1 else np.concatenate(views)

    def share(self, docs: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Number of UTF-8 bytes that tokens start..stop-1 of documents stand for, int64.

        Rounded down at every place in the same way, so that pieces sum to the whole.
        """
        begin, size = self.starts[docs], self.ends[docs] - self.starts[docs]
        whole, rest = np.divmod(self.text_bytes[docs], size)

        def before(place: np.ndarray) -> np.ndarray:
            return whole * (place - begin) + rest * (place - begin) // size

        return before(stop) - before(start)


def _chunk(stream: _Stream, shard: Shard) -> Iterator[tuple[Window, Pieces]]:
    """Pieces of the stream between document ends and row ends."""
    T = shard.seq_len
    step = max(1, BLOCK_TOKENS // T) * T
    for first in range(shard.start, shard.stop, step):
        last = min(first + step, shard.stop)
        lo, hi = np.searchsorted(stream.ends, (first, last), side="right")
        cuts = np.concatenate([np.arange(first, last, T), stream.ends[lo:hi], [last]])
        cuts = np.unique(cuts)
        start, stop = cuts[:-1], cuts[1:]
        docs = np.searchsorted(stream.ends, start, side="right")
        text_bytes = stream.share(docs, start, stop)
        row = (start - first) // T
        yield stream.read(first, last), Pieces(start, stop - start, text_bytes, row)


def _best_fit(stream: _Stream, shard: Shard) -> Iterator[tuple[Window, Pieces]]:
    """Windows of whole documents, each packed by itself."""
    own = np.flatnonzero(
        (stream.starts >= shard.start)
        & (stream.starts < shard.stop)
        & (stream.ends > stream.starts)
    )
    at, ends = 0, stream.ends[own]
    while at < len(own):
        # at least one document, however long, else as many as the window holds
        limit = stream.starts[own[at]] + WINDOW_TOKENS
        end = int(np.searchsorted(ends, limit, side="right"))
        docs = own[at : max(at + 1, min(end, at + WINDOW_DOCS))]
        at += len(docs)
        window = stream.read(int(stream.starts[docs[0]]), int(stream.ends[docs[-1]]))
        rooms = _rooms(stream, docs, window) if shard.related else None
        yield window, _best_fit_pieces(stream, docs, shard.seq_len, rooms)


def _rooms(stream: _Stream, docs: np.ndarray, window: Window) -> np.ndarray:
    """Tokens of a row that each group of texts takes, int64 [docs]: at least as many as places for
    its texts stand for."""
    before = np.concatenate([[0], np.cumsum((window.marks & BEGINS) > 0)])
    starts, ends = stream.starts[docs] - window.start, stream.ends[docs] - window.start
    return np.maximum(ends - starts, TOKENS_PER_TEXT * (before[ends] - before[starts]))


def _best_fit_pieces(
    stream: _Stream, docs: np.ndarray, T: int, rooms: np.ndarray | None = None
) -> Pieces:
    """Splits documents longer than T and assigns each piece a row; rows are ordered by their first
    piece. Whole documents may take other `rooms` than their tokens."""
    size = stream.ends[docs] - stream.starts[docs]
    count = -(-size // T)
    doc = np.repeat(docs, count)
    nth = np.arange(len(doc)) - np.repeat(np.cumsum(count) - count, count)
    start = stream.starts[doc] + nth * T
    stop = np.minimum(start + T, stream.ends[doc])
    row = best_fit_rows(stop - start if rooms is None else np.minimum(rooms, T), T)
    by_row = np.lexsort((start, row))
    first = np.unique(row[by_row], return_index=True)[1]
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(start[by_row][first], kind="stable")] = np.arange(len(first))
    row = rank[row]
    by_row = np.lexsort((start, row))
    doc, start, stop, row = doc[by_row], start[by_row], stop[by_row], row[by_row]
    label = None if stream.labels is None else stream.labels[doc]
    return Pieces(start, stop - start, stream.share(doc, start, stop), row, label)


def _build(window: Window, pieces: Pieces, shard: Shard) -> Iterator[np.ndarray]:
    """Records of the rows of the pieces, a bounded block at a time."""
    T = shard.seq_len
    rows = int(pieces.row[-1]) + 1
    step = max(1, BLOCK_TOKENS // T)
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        lo, hi = np.searchsorted(pieces.row, (begin, begin + count))
        row, length = pieces.row[lo:hi] - begin, pieces.length[lo:hi]
        before = np.cumsum(length) - length  # tokens of the block before each piece
        heads = np.searchsorted(row, np.arange(count))  # first piece of each row
        offset = before - before[heads][row]  # of the piece within its row
        source = np.repeat(pieces.start[lo:hi] - window.start - before, length) + np.arange(
            length.sum()
        )
        block = np.zeros(count, row_dtype(T, shard.dtype, shard.masked, shard.labeled))
        block["length"] = np.add.reduceat(length, heads)
        block["text_bytes"] = np.add.reduceat(pieces.text_bytes[lo:hi], heads)
        real = np.arange(T) < block["length"][:, None]  # [rows, T]
        filled = np.full((count, T), shard.pad_id, shard.dtype)
        filled[real] = window.tokens[source]
        block["tokens"] = filled
        starts = np.zeros((count, T), bool)
        starts[row, offset] = True
        if pieces.label is not None:
            block["labels"][row, offset] = pieces.label[lo:hi]
        if window.tags is not None:
            tags = np.zeros((count, T), np.float32)
            tags[real] = window.tags[source]
            block["labels"] = tags
        if window.marks is not None:
            marks = np.zeros((count, T), np.uint8)
            marks[real] = window.marks[source]
            block["learned"] = np.packbits(marks & (LEARNED | LIKED), axis=1, bitorder="little")
            starts |= (marks & BEGINS) > 0
        block["starts"] = np.packbits(starts, axis=1, bitorder="little")
        yield block
