"""Loader: the batch of step k, prepared ahead by threads.

    step k, batch of G rows --> global rows k G .. (k + 1) G - 1 --> each host reads the
    stretches of it that its devices need

Nothing else goes in: the seed is the store's, so resume is one integer, and any number of
hosts sees the same data.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from lmwright.data.rows.store import TokenStore
from lmwright.data.rows.watch import HashWatch

AHEAD = 4
GRACE_S = 5.0  # for rows of a session that was asked to stop
LOOK_S = 0.5
KEPT_BYTES = (32 << 20) - (64 << 10)


class RowsAway(Exception):
    """Rows of a step do not come: their server stays away, which is the cause, or nobody wants to
    wait for them."""


class Loader:
    """Batches of one host, prepared ahead by threads; a context manager that ends them.

    stretches: (start, stop) of the rows of each batch that are read here; all if unset.
    host: (index, number of hosts): which of the store's files are compared with their hashes
        here, beside the training; None: none are.
    asked: tells whether the session was asked to stop, so that late rows are not waited for.
    input_wait_s: seconds that `batch` has waited so far for input that was not ready.
    """

    def __init__(
        self,
        store: TokenStore,
        global_batch_size: int,
        *,
        stretches: Sequence[tuple[int, int]] | None = None,
        start_step: int = 0,
        host: tuple[int, int] | None = (0, 1),
        asked: Callable[[], bool] = lambda: False,
    ):
        store.check_batch(global_batch_size)
        self.stretches = tuple(stretches or [(0, global_batch_size)])
        self.store, self.global_batch_size = store, global_batch_size
        self.input_wait_s, self._asked = 0.0, asked
        _keep_freed_memory()
        self._pool = ThreadPoolExecutor(store.place.readers, thread_name_prefix="lmwright-loader")
        self._coming: dict[int, Future] = {}
        self._prefetch(start_step)
        self._watch = HashWatch(store, *host) if host and store.verify == "sizes" else None

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Arrays of this host's rows of a step (see `TokenStore.batch`); any step, in any order.

        UserError naming the file once one of the store is found to be altered, and RowsAway.
        """
        if self._watch:
            self._watch.check()
        self._prefetch(step)
        future = self._coming.pop(step)
        begun = time.perf_counter()
        self._wait(future, begun)
        arrays = future.result()
        self.input_wait_s += time.perf_counter() - begun
        return arrays

    def late(self, step: int) -> bool:
        """True if a batch that is being prepared is not there, nor comes within LOOK_S."""
        future = self._coming.get(step)
        return future is not None and bool(wait([future], LOOK_S).not_done)

    def _wait(self, future: Future, begun: float) -> None:
        while not future.done() and wait([future], LOOK_S).not_done:
            if not self._asked():
                begun = time.perf_counter()
            elif time.perf_counter() - begun > GRACE_S:
                raise RowsAway

    def finish(self) -> None:
        """To be called before a run ends well: UserError naming a file of the store if one that
        was not checked yet is found to be altered."""
        if self._watch:
            self._watch.finish()

    def close(self) -> None:
        """Ends the threads and drops batches that were prepared but not used."""
        if self._watch:
            self._watch.close()
        self._pool.shutdown(cancel_futures=True)
        self._coming.clear()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefetch(self, step: int) -> None:
        wanted = range(step, step + 1 + AHEAD)
        for other in [s for s in self._coming if s not in wanted]:
            self._coming.pop(other).cancel()
        for s in wanted:
            ready = s == step or self.store.there((s + 1) * self.global_batch_size)
            if s not in self._coming and ready:
                self._coming[s] = self._pool.submit(self._make, s)

    def _make(self, step: int) -> dict[str, np.ndarray]:
        first = step * self.global_batch_size
        parts = [self.store.batch(first + start, first + stop) for start, stop in self.stretches]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _keep_freed_memory() -> None:
    """Makes glibc keep the memory that batches free; otherwise the pages of each one are faulted in
    anew.

    A freed mapping of up to 32 MiB raises its limits for good (mallopt(3), dynamic mmap
    threshold); that more than doubles the loader's speed. Other allocators ignore it.
    """
    np.empty(KEPT_BYTES, np.uint8)
