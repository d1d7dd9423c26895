"""Shuffle: the training order, described in a manifest or written out row by row.

    virtual   only the manifest: rows are looked up in the packed shards, by seed
    written   epoch-00000/shard-00000.bin ...: the same rows in the same order, to be read
              straight through from a read-only disk or a bucket
    none      source after source, as packed

The eval split is never shuffled.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.config.run import Shuffle
from lmwright.data.dropped import read_made
from lmwright.data.manifest import Manifest, read_manifest
from lmwright.data.progress import Progress
from lmwright.data.rows.order import Order
from lmwright.data.rows.record import row_dtype
from lmwright.data.rows.shards import Shards, UnmappedPlace
from lmwright.data.stage import run_stage
from lmwright.errors import UserError

SHARD_TOKENS = 1 << 26
BUFFER_TOKENS = 1 << 22


@dataclass(frozen=True)
class Stretch:
    """One part: rows start..stop-1 of an epoch."""

    data_dir: str
    pack_hash: str
    facts: dict[str, Any]
    epoch: int
    number: int
    start: int
    stop: int


def shuffle_rows(
    data_dir: str | Path,
    shuffle: Shuffle,
    weights: Mapping[str, float | None] | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Orders the train rows of `<data_dir>/pack`; writes `<data_dir>/shuffle`.

    weights: source name -> share relative to the other weighted sources; None: its own size.
    Raises UserError for a weight that fits no train source, and as `Order` does.
    """
    data_dir = Path(data_dir).absolute()
    packed = read_manifest(data_dir / "pack")
    packed.check_sizes()
    train = packed.counts["sources"].get("train", {})
    given = {k: w for k, w in (weights or {}).items() if w is not None}
    for name in sorted(given.keys() - train.keys()):
        raise UserError(
            f"data.sources: {name!r} has a weight but no rows for training"
            f"{_why_none(data_dir, name)}; correct that, or take the source or its weight out; the "
            f"sources with rows are {', '.join(sorted(train)) or 'none'}"
        )
    facts = {
        "order": shuffle.order,
        "seed": shuffle.seed,
        "block_rows": shuffle.block_rows,
        "epochs": shuffle.epochs if shuffle.order == "written" else 0,
        "sources": sorted(train),
        "rows_per_source": [train[s]["rows"] for s in sorted(train)],
        "weights": [given.get(s) for s in sorted(train)],
    }
    order = order_of(facts)
    _refuse_unread(facts, order)
    step = max(1, shard_tokens // packed.facts["seq_len"])
    parts = [
        Stretch(str(data_dir), packed.hash, facts, e, number, at, min(at + step, order.epoch_rows))
        for e in range(facts["epochs"])
        for number, at in enumerate(range(0, order.epoch_rows, step))
    ]
    return run_stage(
        "shuffle",
        data_dir / "shuffle",
        parts,
        write_stretch,
        fingerprint=facts | {"shard_tokens": shard_tokens},
        inputs={"pack": packed},
        facts=facts | {"epoch_rows": order.epoch_rows},
        workers=workers,
        progress=progress,
    )


def _why_none(data_dir: Path, name: str) -> str:
    """Where the rows of a source have gone, in brackets; empty where that is not known."""
    try:
        texts, tokens = (read_made(data_dir / stage) for stage in ("normalize", "tokenize"))
        read = texts.counts["input"][name]
    except (UserError, KeyError):
        return ""
    held = texts.counts["sources"].get("eval", {}).get(name, {})
    trained = tokens.counts["sources"].get("train", {}).get(name, {})
    known = {
        "bad": read["bad"], "empty": read["empty"], "duplicates": read["duplicates"],
        "held out": held.get("docs", 0),
        "shorter than min_tokens or longer than max_tokens": trained.get("other_length", 0),
    }  # fmt: skip
    parts = [f"{count:,} {what}" for what, count in known.items() if count]
    return f" (of its {read['rows']:,} rows {', '.join(parts)})" if parts else ""


def _refuse_unread(facts: Mapping[str, Any], order: Order) -> None:
    """Raises UserError for a weight so small that no row of its source would ever be read."""
    for name, weight, rows in zip(facts["sources"], facts["weights"], order.quotas, strict=True):
        if weight is not None and rows == 0:
            raise UserError(
                f"data.sources: the weight {weight:g} of {name!r} is less than one row in an epoch "
                f"of {order.epoch_rows:,} rows, so it would never be read; raise it, or remove the "
                "source"
            )


def order_of(facts: Mapping[str, Any]) -> Order:
    """Order that the facts of a shuffle stage describe."""
    kind = "sequential" if facts["order"] == "none" else "shuffled"
    names = ("rows_per_source", "weights", "seed", "block_rows")
    return Order(**{n: facts[n] for n in names}, kind=kind)


def train_shards(place: Any, packed: Manifest) -> Shards:
    """All training rows, one source after another in the order of their names."""
    facts = packed.facts
    kinds = facts.get("masked", False), "labels" in facts
    dtype = row_dtype(facts["seq_len"], facts["dtype"], *kinds)
    names = [
        n
        for s in sorted(packed.counts["sources"].get("train", {}))
        for n in source_files(packed, "train", s)
    ]
    return Shards(place, packed, names, dtype, packed.counts["max_id"])


def source_files(packed: Manifest, split: str, source: str) -> list[str]:
    """Shards of one source, in order."""
    prefix = f"{split}/{source}/shard-"
    return sorted(n for n in packed.files if n.startswith(prefix))


def flat_rows(order: Order, start: int, stop: int) -> np.ndarray:
    """Positions in `train_shards` of global rows start..stop-1; int64 [stop - start]."""
    sources, rows = order.rows(start, stop)
    return rows + order.first_rows[sources]


@functools.lru_cache(1)
def _open_shards(data_dir: str, _pack_hash: str) -> Shards:
    packed = read_manifest(Path(data_dir) / "pack")
    return train_shards(UnmappedPlace(data_dir), packed)


def write_stretch(stretch: Stretch, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: gathers rows a buffer at a time and writes them sequentially."""
    shards = _open_shards(stretch.data_dir, stretch.pack_hash)
    order = order_of(stretch.facts)
    path = tmp_dir / f"epoch-{stretch.epoch:05d}" / f"shard-{stretch.number:05d}.bin"
    path.parent.mkdir(parents=True)
    base = stretch.epoch * order.epoch_rows
    step = max(1, BUFFER_TOKENS // shards.dtype["tokens"].shape[0])
    tokens = 0
    with open(path, "wb") as f:
        for start in range(stretch.start, stretch.stop, step):
            stop = min(start + step, stretch.stop)
            records = shards.read(flat_rows(order, base + start, base + stop))
            f.write(records.view(np.uint8))  # tofile has no errno when the disk is full
            tokens += int(records["length"].sum(dtype=np.int64))
    return {"rows": stretch.stop - stretch.start, "tokens": tokens}
