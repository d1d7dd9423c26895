"""Tokenize: normalized text to flat token files, document boundaries kept.

    normalize/part --row groups--> texts --encode--> [bos] ids [eos] --> part-00000.tokens.bin
                                                                         part-00000.docs.npy

Tokens are little-endian uint16, or uint32 for a vocabulary beyond 65,536. The table of
documents is int64 [documents, 2]: end in tokens, utf-8 bytes of the text.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq

from podsmith.data.encode import Encoder, choose_route, make_encoder
from podsmith.data.manifest import Manifest, read_manifest
from podsmith.data.progress import Progress
from podsmith.data.stage import finished_stage, run_stage
from podsmith.data.tokenizer import load_tokenizer
from podsmith.errors import UserError
from podsmith.run import Tokenize

PART_BYTES = 16 << 20
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Row groups start..stop-1 of one normalized file."""

    number: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """A part with all that a worker needs."""

    part: Part
    folder: str
    """Of the normalized files."""
    tokenizer: str
    fingerprint: str
    route: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: str


def tokenize(
    data_dir: str | os.PathLike,
    settings: Tokenize,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
) -> Manifest:
    """Encodes `<data_dir>/normalize` with `<data_dir>/tokenizer` into `<data_dir>/tokenize`.

    Files: `<split>/<source>/part-00000.tokens.bin` and `.docs.npy`, numbered in input order.
    Counts: `sources` has `docs`, `tokens` and `bytes` (of text) per split and source; `tokens`
    includes what is put before and after a document. Facts: vocab_size, dtype, eos_id, bos_id,
    tokenizer_fingerprint. Raises UserError if a stage before is missing or the tokenizer lacks
    a token that is asked for.
    """
    folder = Path(data_dir).absolute()
    normalized, tokenizer = (read_manifest(folder / s) for s in ("normalize", "tokenizer"))
    facts = _facts(tokenizer, settings)
    parts = plan_parts(normalized, part_bytes)
    # Any proven route gives the same ids; a named sentencepiece may settle ties its own way.
    named = settings.route if settings.route == "sentencepiece" else "any"
    fingerprint = {
        "parts": [asdict(p) for p in parts],
        "prepend": settings.prepend,
        "append": settings.append,
        "route": named,
        "tokenizer": facts["tokenizer_fingerprint"],
    }
    target = folder / "tokenize"
    inputs = {"normalize": normalized}
    found = finished_stage("tokenize", target, len(parts), fingerprint=fingerprint, inputs=inputs)
    if found:
        return found
    route = choose_route(load_tokenizer(folder / "tokenizer"), settings.route)
    before = (facts["bos_id"],) if settings.prepend == "bos" else ()
    after = (facts["eos_id"],) if settings.append == "eos" else ()
    places = (str(folder / "normalize"), str(folder / "tokenizer"))
    shared = (*places, facts["tokenizer_fingerprint"], route, before, after, facts["dtype"])
    return run_stage(
        "tokenize",
        target,
        [Work(part, *shared) for part in parts],
        write_part,
        fingerprint=fingerprint,
        inputs=inputs,
        facts=facts,
        workers=workers,
        progress=progress,
    )


def _facts(tokenizer: Manifest, settings: Tokenize) -> dict[str, Any]:
    facts = {k: tokenizer.facts[k] for k in ("vocab_size", "eos_id", "bos_id")}
    if facts["eos_id"] is None:
        raise UserError(
            'The tokenizer says no token that ends a document; add "eos_token" to the '
            "tokenizer_config.json beside data.tokenizer.path."
        )
    if settings.prepend == "bos" and facts["bos_id"] is None:
        raise UserError(
            "data.tokenize.prepend='bos': the tokenizer has no such token; add \"bos_token\" to "
            "the tokenizer_config.json beside data.tokenizer.path, or set it to 'none'."
        )
    return facts | {
        "dtype": "uint16" if facts["vocab_size"] <= 1 << 16 else "uint32",
        "tokenizer_fingerprint": tokenizer.facts["tokenizer_fingerprint"],
    }


def plan_parts(normalized: Manifest, part_bytes: int) -> list[Part]:
    """Stretches of row groups of about `part_bytes` of text, in input order."""
    parts: list[Part] = []
    for name in sorted(n for n in normalized.files if n.endswith(".parquet")):
        with contextlib.closing(pq.ParquetFile(Path(normalized.folder) / name)) as file:
            sizes = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        start, size = 0, 0
        for i, group in enumerate(sizes):
            if size and size + group.total_byte_size > part_bytes:
                parts.append(Part(len(parts), name, start, i))
                start, size = i, 0
            size += group.total_byte_size
        parts.append(Part(len(parts), name, start, len(sizes)))
    return parts


def write_part(work: Work, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: its token files; returns the counts."""
    encoder = _encoder(work.tokenizer, work.fingerprint, work.route)
    writers: dict[tuple[str, str], _DocumentWriter] = {}
    with contextlib.ExitStack() as stack, _one_thread():
        for rows in read_texts(Path(work.folder) / work.part.file, work.part.start, work.part.stop):
            for (text, source, split), ids in zip(
                rows, encoder.encode_batch([text for text, _, _ in rows]), strict=True
            ):
                writer = writers.get((split, source))
                if writer is None:
                    stem = tmp_dir / split / source / f"part-{work.part.number:05d}"
                    writer = stack.enter_context(_DocumentWriter(stem, work))
                    writers[split, source] = writer
                writer.write(ids, len(text.encode()))
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for (split, source), writer in writers.items():
        counts.setdefault(split, {})[source] = writer.counts()
    return {"sources": counts}


def read_texts(path: Path, start: int, stop: int) -> Iterator[list[tuple[str, str, str]]]:
    """Batches of (text, source, split) of about 1 MiB from row groups start..stop-1."""
    columns = ["text", "source", "split"]
    with contextlib.closing(pq.ParquetFile(path, pre_buffer=False)) as file:
        for i in range(start, stop):
            group = file.metadata.row_group(i)
            size = max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
            for batch in file.iter_batches(size, [i], columns, use_threads=False):
                yield list(zip(*(batch.column(c).to_pylist() for c in columns), strict=True))


class _DocumentWriter:
    """Token file and table of documents of one source and split."""

    def __init__(self, stem: Path, work: Work):
        self.stem = stem
        self.before, self.after = work.before, work.after
        self.dtype = np.dtype(work.dtype).newbyteorder("<")
        self.tokens = 0
        self.docs: list[tuple[int, int]] = []
        self.file: BinaryIO | None = None

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        ids = np.concatenate(
            [np.array(self.before, ids.dtype), ids, np.array(self.after, ids.dtype)]
        )
        if not len(ids):
            return  # its tokenizer gives nothing for it, and nothing is put around it
        self.file.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        self.docs.append((self.tokens, text_bytes))

    def counts(self) -> dict[str, int]:
        text_bytes = sum(n for _, n in self.docs)
        return {"docs": len(self.docs), "tokens": self.tokens, "bytes": text_bytes}

    def __enter__(self) -> "_DocumentWriter":
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(f"{self.stem}.tokens.bin", "wb")
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        np.save(f"{self.stem}.docs.npy", np.array(self.docs, "<i8").reshape(-1, 2))


@functools.lru_cache(1)
def _encoder(folder: str, _fingerprint: str, route: str) -> Encoder:
    return make_encoder(load_tokenizer(folder), route)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Parts run side by side already: the tokenizers library is not to add threads."""
    name = "TOKENIZERS_PARALLELISM"
    old = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
