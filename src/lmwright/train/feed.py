"""Feed: the batch of a step from the data of each trainee, each with its own place in it.

    trainee a: rows 0 1 2 3 of its own step --+
    trainee b: rows 0 1     of its own step --+--> rows by lane (see `program.step`)

The batch of a trainee's own step s is what it would be if it trained alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import jax
import numpy as np

from lmwright.data.rows.loader import Loader, RowsAway
from lmwright.data.rows.store import TokenStore
from lmwright.errors import StorageError
from lmwright.program.step import Lanes
from lmwright.program.trainee import Trainee
from lmwright.train.hosts import HostRows


class Feed:
    """Batches of one host for the trainees that train, read ahead in threads."""

    def __init__(
        self,
        active: Sequence[Trainee],
        stores: Mapping[str, TokenStore],
        counts: Mapping[str, int],
        lanes: Lanes,
        host: HostRows,
        start: int,
        asked: Callable[[], bool],
    ):
        self._start, self._counts = start, [counts[trainee.name] for trainee in active]
        shares = [lanes.trainees.count(i) for i in range(len(active))]
        self._order = row_order(lanes, host)
        self._stack = ExitStack()
        self._places = [stores[trainee.name].place for trainee in active]
        for place in self._places:
            place.hurry(False)
        self._loaders = [
            self._stack.enter_context(
                Loader(
                    stores[trainee.name],
                    global_batch_size=trainee.rows,
                    stretches=own_stretches(host, len(lanes.trainees), share),
                    start_step=count,
                    host=(jax.process_index(), jax.process_count()),
                    asked=asked,
                )
            )
            for trainee, share, count in zip(active, shares, self._counts, strict=True)
        ]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Arrays of this host's rows of a step of the run. Raises RowsAway."""
        try:
            parts = [
                loader.batch(count + step - self._start)
                for loader, count in zip(self._loaders, self._counts, strict=True)
            ]
        except StorageError as error:
            raise RowsAway from error
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([p[name] for p in parts])[self._order] for name in parts[0]}

    def late(self, step: int) -> bool:
        """True if this host's rows of a step are not there, nor come in a moment."""
        return any(
            loader.late(count + step - self._start)
            for loader, count in zip(self._loaders, self._counts, strict=True)
        )

    def finish(self) -> None:
        """Raises UserError for a store that is found to be altered at the end of a run."""
        for loader in self._loaders:
            loader.finish()

    def close(self) -> None:
        """Ends the threads, which ask no server again."""
        for place in self._places:
            place.hurry(True)
        self._stack.close()


def own_stretches(host: HostRows, lanes: int, share: int) -> list[tuple[int, int]]:
    """The rows of a trainee's own batch that a host reads, as (start, stop); `share` of the `lanes`
    are the trainee's."""
    num = host.num_microbatches
    return [(s // lanes * share * num, e // lanes * share * num) for s, e in host.stretches]


def row_order(lanes: Lanes, host: HostRows) -> np.ndarray:
    """Position of each row of a host's batch among the rows of all trainees, one trainee's after
    the other's."""
    num, of = host.num_microbatches, np.array(lanes.trainees)
    groups = sum(stop - start for start, stop in host.stretches) // len(of)
    shares = np.bincount(of)
    starts = np.concatenate([[0], np.cumsum(shares * groups * num)[:-1]])
    place = np.array([np.sum(of[:i] == trainee) for i, trainee in enumerate(of)])
    group, lane, piece = np.ix_(np.arange(groups), np.arange(len(of)), np.arange(num))
    own = (group * shares[of][lane] + place[lane]) * num + piece
    return (starts[of][lane] + own).reshape(-1)
