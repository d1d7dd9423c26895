"""Portioned: rows of portions in order, also while later ones are being prepared.

    global row g --> epoch, portion --> row of that portion's own order in that epoch
                     one after the other, by the rows that were declared

Every epoch goes through the portions in their order. A row is a function of what was declared and
of its own portion alone, so it is the same whether later portions are there or not.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from lmwright.data.manifest import Manifest, digest, dump_json
from lmwright.data.portions import PORTIONS, Finished, Portions, folder_of, parse_portions
from lmwright.data.rows.order import Order
from lmwright.data.rows.shards import Place, Watched
from lmwright.errors import UserError


class OwnStore(Protocol):
    """The store of a portion."""

    place: Place
    packed: Manifest
    shuffled: Manifest
    epoch_rows: int
    order: Order
    sources: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows and their order."""

    def is_called(self, fingerprint: str) -> bool:
        """True for its fingerprint, also that of earlier versions."""

    @property
    def shape(self) -> dict[str, Any]:
        """All that stores of one run have in common."""

    def records(self, start: int, stop: int) -> np.ndarray:
        """Packed records of its rows start..stop-1, counted over all epochs."""

    def files(self) -> list[Watched]:
        """Files that are read."""


class Portioned:
    """The portions of a store at a folder or URL, which `open_one` opens by their place."""

    def __init__(self, url: str, top: Place, open_one: Callable[[str], OwnStore]):
        self._url, self._top, self._open_one = url, top, open_one
        self._told = parse_portions(top.read(PORTIONS) or b"", url)
        self._lock = threading.Lock()
        self._open_ones: dict[int, OwnStore] = {}
        self._expected: dict[int, str] = {}
        if not self.finished:
            raise UserError(f"{url}: no portion is finished; run `lmwright prepare` to make them")
        sizes = [sum(self._told.rows_of(number).values()) for number in range(self.count)]
        self.ends = np.cumsum(sizes)
        """Rows of an epoch up to the end of each portion."""
        self.epoch_rows = int(self.ends[-1])

    @property
    def count(self) -> int:
        """Number of portions."""
        return self._told.count

    @property
    def finished(self) -> int:
        """Number of portions that are finished, as far as is known."""
        return len(self._told.finished)

    @property
    def whole(self) -> bool:
        """True if every portion is open."""
        return len(self._open_ones) == self.count

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what was declared, and of the first portion."""
        return digest(dump_json(self._told.declared))

    @property
    def prints(self) -> list[str]:
        """Fingerprints of the portions that are known, in their order."""
        known = {number: one.fingerprint for number, one in enumerate(self._told.finished)}
        return [known_print for _, known_print in sorted((self._expected | known).items())]

    def expect(self, prints: Sequence[str]) -> None:
        """Holds portions to the fingerprints that a run was trained on. Raises UserError for one
        that differs, now or when it comes."""
        self._expected = dict(enumerate(prints))
        for number, one in enumerate(self._told.finished):
            self._compare(number, one)

    def folder(self, number: int) -> str:
        """Folder or URL of a portion."""
        return f"{self._url}/{folder_of(number)}"

    def last(self, stop: int) -> int:
        """The last portion that rows before `stop` lie in, over all epochs."""
        if stop > self.epoch_rows:
            return self.count - 1
        return int(np.searchsorted(self.ends, max(stop, 1) - 1, side="right"))

    def there(self, stop: int) -> bool:
        """True if the rows before `stop` can be read, by what lies there now. Raises UserError
        where other portions are prepared there meanwhile."""
        number = self.last(stop)
        if number >= self.finished:
            self._look()
        return number < self.finished

    def records(self, start: int, stop: int) -> np.ndarray:
        """Packed records of global rows start..stop-1. Raises UserError where they are not
        there."""
        pieces, at = [], start
        while at < stop:
            epoch, place = divmod(at, self.epoch_rows)
            number = int(np.searchsorted(self.ends, place, side="right"))
            end = min(stop, at + int(self.ends[number]) - place)
            store = self.open(number)
            first = int(self.ends[number]) - store.epoch_rows  # of its rows in an epoch
            own = epoch * store.epoch_rows + place - first
            pieces.append(store.records(own, own + end - at))
            at = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def files(self) -> list[Watched]:
        """Files of the portions that were read so far; more come at the end."""
        return [file for store in list(self._open_ones.values()) for file in store.files()]

    def open(self, number: int) -> OwnStore:
        """Store of a portion. Raises UserError for one that is not finished, or not what was
        declared."""
        with self._lock:
            if number not in self._open_ones:
                if not self.there(int(self.ends[number])):
                    raise UserError(
                        f"{self.folder(number)}: portion {number + 1} of {self.count} is not "
                        "finished; `lmwright prepare` makes it"
                    )
                store = self._open_one(self.folder(number))
                self._check(number, store)
                self._open_ones[number] = store
            return self._open_ones[number]

    def _look(self) -> None:
        """Takes in portions that were finished since."""
        raw = self._top.read(PORTIONS)
        told: Portions | None = None if raw is None else parse_portions(raw, self._url)
        if told is None or told.declared != self._told.declared:
            raise UserError(
                f"{self._url}: was prepared anew with other settings or text; prepare it as before"
            )
        for number, one in enumerate(told.finished):
            self._compare(number, one)
        self._told = told

    def _compare(self, number: int, one: Finished) -> None:
        known = dict(enumerate(seen.fingerprint for seen in self._told.finished)) | self._expected
        if known.get(number, one.fingerprint) != one.fingerprint:
            raise UserError(
                f"{self.folder(number)}: portion {number + 1} is not what was trained on; prepare "
                "it as before"
            )

    def _check(self, number: int, store: OwnStore) -> None:
        have = dict(zip(store.sources, store.order.rows_per_source, strict=True))
        first = self._open_ones.get(0, store)
        told = self._told.finished[number].fingerprint
        as_told = store.is_called(told) and have == self._told.rows_of(number)
        if not as_told or store.shape != first.shape:
            raise UserError(
                f"{self.folder(number)}: is not the portion that {PORTIONS} lists; run `lmwright "
                "prepare` again, or copy the whole folder again"
            )
