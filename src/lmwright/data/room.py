"""Room: disk that preparing takes, and how much text there is, by the sizes of the files."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lmwright.config import rows as row_kinds
from lmwright.config.run import Run, Source
from lmwright.data.sources.files import INFLATION, find_files

BYTES_PER_TOKEN = 6
"""Bytes of text in a token, at the upper end of what is usual."""
FEWEST_BYTES_PER_TOKEN = 2
FEW_IDS, FEWER_BYTES_PER_TOKEN = 1 << 14, 1
"""Bytes in a token with a vocabulary of at most so many ids, which are fewer."""
ONE_DOCUMENT_MORE = 1.1
"""Ratio of the tokens that a sample takes to those that it is to have."""
NORMALIZED_SHARE = 0.6
"""Ratio of bytes of normalized parquet to bytes of text."""
BESIDE_TOKEN_BYTES = 0.25
"""Bytes for each token of packed rows beside its id: where segments start, lengths, padding."""
LEARNED_BYTES = 1
GB = 1e9


@dataclass(frozen=True)
class Room:
    """Estimated bytes on disk that the stages of a run take."""

    normalize: float
    tokenize: float
    pack: float
    shuffle: float

    @property
    def store(self) -> float:
        """Bytes of the rows that training reads."""
        return self.pack + self.shuffle

    @property
    def all(self) -> float:
        """Bytes of all stages together."""
        return self.normalize + self.tokenize + self.store

    @property
    def peak(self) -> float:
        """Most bytes at once, if each stage is dropped when the next one has read it."""
        return max(self.normalize + self.tokenize, self.tokenize + self.pack, self.store)


def room_of(run: Run) -> Room | None:
    """Room of a run's stages; None where the size of a source is not known."""
    ids = run.model.vocab_size
    least = FEWEST_BYTES_PER_TOKEN if ids > FEW_IDS else FEWER_BYTES_PER_TOKEN
    text = tokens = 0.0
    for source in run.data.sources:
        size = _source_bytes(source, run.data.dir)
        if size is None:
            return None
        text += size
        sample = ONE_DOCUMENT_MORE * (source.sample_tokens or float("inf"))
        tokens += min(size / least, sample)
    size = 2 if ids <= 1 << 16 else 4
    plain = all(source.rows == row_kinds.PLAIN[0] for source in run.data.sources)
    beside = 0 if plain else LEARNED_BYTES
    packed = tokens * (size + beside + BESIDE_TOKEN_BYTES)
    written = run.data.shuffle.epochs if run.data.shuffle.order == "written" else 0
    return Room(text * NORMALIZED_SHARE, tokens * (size + beside), packed, written * packed)


def room_line(run: Run) -> str:
    """Sentence about the room that `prepare --keep store` takes."""
    room = room_of(run)
    if room is None:
        return "disk: unknown, since the sources do not say their sizes; sample_tokens limits them"
    line = (
        f"disk: up to {room.peak / GB:,.2f} GB at once and {room.store / GB:,.2f} GB in the end, "
        f"instead of {room.all / GB:,.2f} GB with every stage"
    )
    if "://" in run.data.dir:
        return line
    here = Path(run.data.dir).absolute()
    while not here.exists():
        here = here.parent
    free = shutil.disk_usage(here).free
    return f"{line}; {free / GB:,.2f} GB are free" + (", too few" if free < room.peak else "")


def text_bytes(run: Run) -> float | None:
    """Estimated bytes of text in the run's sources, or of their samples, by the sizes of their
    files; None where one has no size. Raises UserError where one is missing."""
    sizes = [_source_bytes(source, run.data.dir) for source in run.data.sources]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _source_bytes(source: Source, data_dir: str | os.PathLike) -> float | None:
    most = source.sample_tokens and BYTES_PER_TOKEN * source.sample_tokens
    if source.path.startswith("hf://"):  # streamed: its shards do not tell their sizes
        return most
    total: float | None = 0
    for file in find_files(source, data_dir):
        packed = file.compression is not None or file.format == "parquet"
        if file.size is None or total is None:
            total = None
        else:
            total += file.size * (INFLATION if packed else 1)
    return min((size for size in (total, most) if size is not None), default=None)
