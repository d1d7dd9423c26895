"""Portions: a store in pieces, prepared one after the other; training begins with the first.

    data/portion-000/ ...   an ordinary store, with its share of the rows of each source
    data/portions.json      rows that were declared, and the portions that are finished

The numbers of rows follow from `sample_tokens` alone, so the order over all of them is known before
the second one is begun.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lmwright.data.manifest import SELF, digest, dump_json
from lmwright.data.sources.file import Slice, content_stamp
from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import without_secrets

PORTIONS = "portions.json"
FORMAT = 1

Start = tuple[int, int]
"""Part of the source's drawn order in which a portion begins, and rows of it that come before."""


@dataclass(frozen=True)
class Portion:
    """A portion as the stages that make it are told of it."""

    number: int
    rows: Mapping[str, int]
    """Of each source of training."""
    starts: Mapping[str, Start]
    drawn: Mapping[str, str]
    """Digests of the drawn orders of the sources; empty before there are any."""
    orders: dict[str, list[Any]] = field(default_factory=dict)
    """Drawn orders that this process has listed already."""

    def order(self, name: str, make: Callable[[], list[Any]]) -> list[Any]:
        """Parts of a source in their drawn order. Raises UserError unless they are those of the
        first portion."""
        if name not in self.orders:
            self.orders[name] = make()
        said, order = self.drawn.get(name), self.orders[name]
        # of earlier versions with the times of files
        digests = (digest_of(order, times=times) for times in (False, True))
        if said is not None and said not in digests:
            raise UserError(
                f"data.sources: {name}: its files are not those that the portions before were cut "
                "from; put them back, or prepare in another data.dir"
            )
        return order

    def ends(self, used: Sequence[Any], counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Facts of the parts that were used: where the next portion begins, and what was drawn."""
        ends: dict[str, Start] = {}
        before: dict[str, int] = {}
        for part, counted in zip(used, counts, strict=True):
            if part.name in self.rows:
                place = before.setdefault(part.name, part.number)
                first = self.starts.get(part.name, (0, 0))[0]
                rows = counted["input"][part.name]["rows"] + part.skip_rows
                ends[part.name] = first + part.number - place, rows
        return {"starts": ends, "drawn": {name: digest_of(self.orders[name]) for name in ends}}


@dataclass(frozen=True)
class Finished:
    """A finished portion."""

    fingerprint: str
    """Of its store."""
    starts: Mapping[str, Start]
    """Where the next one begins."""


@dataclass(frozen=True)
class Portions:
    """The portions of a store, as portions.json lists them."""

    count: int
    rows: Mapping[str, int]
    """Of each source of training, over all portions."""
    asked: str
    """Digest of the settings that the rows follow from."""
    drawn: Mapping[str, str]
    """Digests of the drawn orders of the sources."""
    finished: tuple[Finished, ...] = ()

    def rows_of(self, number: int) -> dict[str, int]:
        """Rows of each source in a portion; those of all portions differ by one at most."""
        return {name: share(rows, number, self.count) for name, rows in self.rows.items()}

    @property
    def declared(self) -> dict[str, Any]:
        """Facts that hold from the first portion on; later ones change nothing of them. All
        settings are in the first one's fingerprint."""
        first = self.finished[0].fingerprint if self.finished else ""
        facts = {"count": self.count, "rows": self.rows, "drawn": self.drawn, "first": first}
        return {"format": FORMAT, **facts}

    def to_json(self) -> bytes:
        body = asdict(self) | {"format": FORMAT}
        return dump_json(body | {SELF: digest(dump_json(body))})


def digest_of(order: Sequence[Any], *, times: bool = False) -> str:
    """Digest of a drawn order, free of the secrets in its URLs. Files of this machine are known by
    what they hold, or by their `times`."""
    slices = [[_facts(piece, times) for piece in part] for part in order]
    return digest(dump_json(redact_tree(slices, without_secrets)))


def _facts(piece: Slice, times: bool) -> dict[str, Any]:
    stamp = piece.file.stamp if times else content_stamp(piece.file)
    return asdict(replace(piece, file=replace(piece.file, stamp=stamp)))


def share(total: int, number: int, count: int) -> int:
    """Part `number` of a total that is cut in `count` parts."""
    return total * (number + 1) // count - total * number // count


def folder_of(number: int) -> str:
    """Name of a portion's folder."""
    return f"portion-{number:03d}"


def local_folders(data_dir: str | os.PathLike) -> list[Path]:
    """Folders of the finished portions of a store on this machine; itself, if it is in one piece.
    Raises UserError for a damaged list."""
    top = Path(data_dir)
    try:
        raw = (top / PORTIONS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [top]
    return [top / folder_of(n) for n in range(len(parse_portions(raw, str(top)).finished))]


def refuse_unfinished(portions: Portions, where: str | os.PathLike, why: str) -> None:
    """Raises UserError, which says `why`, unless all portions are finished."""
    if len(portions.finished) < portions.count:
        raise UserError(
            f"{where}: {len(portions.finished)} of {portions.count} portions are finished, "
            f"and {why}; wait until `lmwright prepare` has made all"
        )


def parse_portions(raw: bytes, where: str) -> Portions:
    """Portions from the bytes of a portions.json; UserError for another or a damaged file."""
    try:
        body = json.loads(raw)
        recorded = body.pop(SELF)
        if body.pop("format") != FORMAT or recorded != digest(dump_json(body | {"format": FORMAT})):
            raise ValueError("its hash differs")
        finished = []
        for portion in body.pop("finished"):
            starts = {name: (int(a), int(b)) for name, (a, b) in portion["starts"].items()}
            finished.append(Finished(portion["fingerprint"], starts))
        return Portions(**body, finished=tuple(finished))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}/{PORTIONS} is damaged ({error}); remove it and run `lmwright prepare` again"
        ) from None
