"""Watch: verifies the hashes of a store's files while training reads them.

    train ---- step ---- step ---- step ----> stops with the name of the file
    watch  file ok   file ok   file ALTERED --^

Opening a store compares sizes only, since hashing terabytes would hold up the first step.
"""

import contextlib
import os
import threading
import time

import xxhash

from lmwright.data.manifest import altered_error
from lmwright.data.rows.shards import Place
from lmwright.data.rows.store import TokenStore
from lmwright.errors import StorageError, UserError

# Hashing takes at most this share of one core and of the time of the disk while a run trains,
# and all of it for as long as a run waits at its end.
SHARE = 0.25
LAST_WAIT_S = 10.0
LOOK_S = 10.0


class HashWatch:
    """A thread that hashes every `count`-th file of a store from `index` on, once.

    The hosts of a run share the files among them. `check` raises what was found.
    """

    def __init__(self, store: TokenStore, index: int = 0, count: int = 1):
        self._store, self._mine = store, slice(index, None, count)
        self._found: UserError | None = None
        self._stop, self._ending = threading.Event(), threading.Event()
        self._share = SHARE
        self._thread = threading.Thread(target=self._run, name="lmwright-hashes", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError naming a file that was found altered."""
        if self._found is not None:
            raise self._found

    def finish(self) -> None:
        """Waits a little for files that are not checked yet, which are all in a short run. Raises
        UserError naming a file that was found altered."""
        self._share = 1.0
        self._ending.set()
        self._thread.join(LAST_WAIT_S)
        self.check()

    def close(self) -> None:
        """Ends the thread; remaining files stay unchecked."""
        self._stop.set()
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        seen = 0
        while True:
            ended, files = self._ending.is_set() or self._store.whole, self._store.files()
            for place, file, wanted in files[self._mine][seen:]:
                # a file that cannot be read ends the training where it is needed
                with contextlib.suppress(OSError, StorageError):
                    if (have := self._hash(place, file)) is not None and have != wanted:
                        what = "its hash is not the manifest's"
                        self._found = altered_error(place.name(file), what)
                if self._found or self._stop.is_set():
                    return
                seen += 1
            if ended:
                return
            self._ending.wait(LOOK_S)  # for files that are yet to come

    def _hash(self, place: Place, file: str) -> str | None:
        """xxh3_128 of a file, hex; None if asked to stop."""
        h = xxhash.xxh3_128()
        begun = time.monotonic()
        for piece in place.pieces(file):
            h.update(piece)
            worked = time.monotonic() - begun
            if self._stop.wait(worked * (1 / self._share - 1)):
                return None
            begun = time.monotonic()
        return h.hexdigest()
