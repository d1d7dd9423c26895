"""Order: which row is trained on when, as a pure function of (seed, global row number).

    g --> epoch, block --> (source, k-th draw of it) --> pass of the source, place --> row
          Philox shuffle    sources spread evenly         Feistel permutation of its rows

An epoch has as many rows as the sources together. Sources without a weight are walked once
an epoch; weighted ones share their rows' number by weight, so that one may be walked 2.7
times and another 0.4 times. A walk goes on across epochs: at the end of every block, a source's
rows have come equally often, give or take one. Within a block, walks that meet are mixed. Only
blocks are ever held, so a store of any size has random access.

Spreading by stride is the divisor method of Webster and Sainte-Lague, row by row. The
permutation is a Feistel network over Z_a x Z_b with cycle walking (Black and Rogaway, 2002,
https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf); only raw Philox bits are used, which
numpy keeps stable, never its distributions, which it does not.
"""

import functools
import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from lmwright.errors import UserError

ROUNDS = 8
CACHED_BLOCKS = 16
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class Order:
    """Training order over sources of `rows_per_source` rows.

    weights: relative shares, None for a source that keeps its own size.
    kind: "shuffled", or "sequential": source after source, each in its own order.
    """

    def __init__(
        self,
        rows_per_source: Sequence[int],
        weights: Sequence[float | None] | None = None,
        seed: int = 0,
        block_rows: int = 4096,
        kind: Literal["shuffled", "sequential"] = "shuffled",
    ):
        self.rows_per_source = tuple(int(n) for n in rows_per_source)
        self.weights = tuple(weights) if weights else (None,) * len(self.rows_per_source)
        self.seed, self.block_rows, self.kind = seed, block_rows, kind
        self.epoch_rows = sum(self.rows_per_source)
        self._check()
        self.quotas = _quotas(self.rows_per_source, self.weights)
        self._ends = np.cumsum(self.rows_per_source)
        self.first_rows = self._ends - self.rows_per_source
        # per instance, and safe under the loader's threads
        self._block = functools.lru_cache(CACHED_BLOCKS)(self._make_block)

    def _check(self) -> None:
        if not self.epoch_rows:
            raise UserError("data: no source has any rows for training; add text")
        weighted = [w for w in self.weights if w is not None]
        if weighted and self.kind == "sequential":
            raise UserError(
                'data.shuffle.order = "none" reads source after source, so weights have no '
                "effect; remove data.sources.weight or shuffle"
            )
        if len(weighted) == 1 and len(self.weights) > 1:
            raise UserError(
                "data.sources: a weight is relative to the other weighted sources, and only "
                "one source has one; give a weight to at least two"
            )
        for n, w in zip(self.rows_per_source, self.weights, strict=True):
            if w is not None and n == 0:
                raise UserError("data.sources: a weighted source is empty; remove it")

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and row of each global row number start..stop-1, counted over all epochs.

        Returns two int64 arrays [stop - start]: index of the source, row within it.
        """
        out = np.empty((2, stop - start), np.int64)
        at = start
        while at < stop:
            epoch, place = divmod(at, self.epoch_rows)
            if self.kind == "sequential":
                end = min(stop, at + self.epoch_rows - place)
                piece = self._sequential(place, place + end - at)
            else:
                number, offset = divmod(place, self.block_rows)
                block = self._block(epoch, number)
                end = min(stop, at + block.shape[1] - offset)
                piece = block[:, offset : offset + end - at]
            out[:, at - start : end - start] = piece
            at = end
        return out[0], out[1]

    def drawn(self, row: int) -> tuple[int, ...]:
        """Number of rows of each source among the first `row` rows of an epoch; exact, monotone."""
        m, quotas = self.epoch_rows, self.quotas
        # draw k of a source that has q an epoch falls at time (k + 1/2) m / q
        early = max(0, row - len(quotas))
        counts = [(2 * early * q + m) // (2 * m) for q in quotas]
        following = [
            (Fraction((2 * k + 1) * m, 2 * q), i)
            for i, (k, q) in enumerate(zip(counts, quotas, strict=True))
            if k < q
        ]
        heapq.heapify(following)
        for _ in range(row - sum(counts)):
            _, i = heapq.heappop(following)
            counts[i] += 1
            if counts[i] < quotas[i]:
                time = Fraction((2 * counts[i] + 1) * m, 2 * quotas[i])
                heapq.heappush(following, (time, i))
        return tuple(counts)

    def _sequential(self, start: int, stop: int) -> np.ndarray:
        places = np.arange(start, stop)
        sources = np.searchsorted(self._ends, places, side="right")
        return np.stack([sources, places - self.first_rows[sources]])

    def _make_block(self, epoch: int, number: int) -> np.ndarray:
        """Sources and rows of one block, int64 [2, rows]."""
        first = number * self.block_rows
        last = min(first + self.block_rows, self.epoch_rows)
        before, after = np.array(self.drawn(first)), np.array(self.drawn(last))
        sources = np.repeat(np.arange(len(before)), after - before)
        starts = np.concatenate([[0], np.cumsum(after - before)[:-1]])
        within = np.arange(last - first) - starts[sources] + before[sources]
        draws = within + epoch * np.array(self.quotas)[sources]
        sizes = np.array(self.rows_per_source)[sources]
        passes, places = np.divmod(draws, sizes)
        rows = permute(places, sizes, _keys(self.seed, sources, passes))
        mixed = _shuffle(last - first, self.seed, epoch, number)
        block = np.stack([sources, rows])[:, mixed]
        block.setflags(write=False)  # callers share it through the cache
        return block


def permute(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Position under the permutation of range(size) that belongs to the key, elementwise.

    places, sizes: int64 [n], 0 <= places < sizes. keys: uint64 [n]. Returns int64 [n].
    """
    sizes = sizes.astype(np.uint64)
    a = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    b = (sizes + a - 1) // a  # a * b >= size, by less than a: walks are short
    out = places.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        out[todo] = _feistel(out[todo], a[todo], b[todo], keys[todo])
        todo = todo[out[todo] >= sizes[todo]]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: np.ndarray) -> np.ndarray:
    left, right = x % a, x // a
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right + _mix(keys + np.uint64(i + 1))) % a) % a
        right = (right + _mix(left + _mix(keys + np.uint64(i + 2))) % b) % b
    return left + right * a


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood, 2014): every input bit reaches every output bit."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, sources: np.ndarray, passes: np.ndarray) -> np.ndarray:
    base = _mix(np.full(1, seed & MASK, np.uint64))
    return _mix(_mix(base + sources.astype(np.uint64)) + passes.astype(np.uint64))


def _shuffle(size: int, seed: int, epoch: int, number: int) -> np.ndarray:
    """Permutation of range(size) from raw Philox bits."""
    key = np.array([seed & MASK, epoch], np.uint64)
    counter = np.array([0, 0, 0, number], np.uint64)
    bits = np.random.Philox(key=key, counter=counter)
    return np.argsort(bits.random_raw(size), kind="stable")


def _quotas(sizes: Sequence[int], weights: Sequence[float | None]) -> tuple[int, ...]:
    """Number of rows of each source in an epoch; weighted sources share by largest remainder."""
    quotas = list(sizes)
    shared = [i for i, w in enumerate(weights) if w is not None]
    rows = sum(sizes[i] for i in shared)
    whole = sum(Fraction(weights[i]) for i in shared)
    exact = {i: Fraction(weights[i]) / whole * rows for i in shared}
    for i in shared:
        quotas[i] = int(exact[i])
    left = rows - sum(quotas[i] for i in shared)
    for i in sorted(shared, key=lambda i: (quotas[i] - exact[i], i))[:left]:
        quotas[i] += 1
    return tuple(quotas)
