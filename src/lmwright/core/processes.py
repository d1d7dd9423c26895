"""Small values that the processes of a run exchange. All of them must call a function together; in
a run of one process, each is free."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import ArrayLike


def from_first(value: ArrayLike) -> np.ndarray:
    """A value of process 0, on all; its shape and dtype are the same everywhere."""
    if jax.process_count() == 1:
        return np.asarray(value)
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def of_all(value: ArrayLike) -> np.ndarray:
    """The values of all processes, [processes, ...], on each of them."""
    if jax.process_count() == 1:
        return np.asarray(value)[None]
    return np.asarray(multihost_utils.process_allgather(np.asarray(value)))


def meet(place: str) -> None:
    """Waits until all processes have come to a place of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)
