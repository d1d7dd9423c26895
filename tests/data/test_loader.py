"""The loader: a step's batch depends on the step alone, over any hosts and resumes."""

import threading
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from lmwright.data.rows.loader import Loader
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from tests.data.small_store import prepared, same

G = 12


@pytest.fixture(scope="module", params=["virtual", "written"])
def store(request, tmp_path_factory):
    return TokenStore.open(prepared(tmp_path_factory.mktemp("loader"), request.param))


def steps_of(store):
    """Enough steps to pass the ends of two epochs."""
    return range(0, 3 * store.epoch_rows // G, 3)


def test_a_step_is_its_rows(store):
    with Loader(store, G) as loader:
        for k in steps_of(store):
            same(loader.batch(k), store.batch(k * G, (k + 1) * G))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_give_the_whole_batch(store, hosts):
    whole = Loader(store, G)
    size = G // hosts
    parts = [Loader(store, G, stretches=[(p * size, (p + 1) * size)]) for p in range(hosts)]
    for k in steps_of(store):
        slices = [loader.batch(k) for loader in parts]
        assert slices[0]["tokens"].shape == (G // hosts, store.seq_len)
        joined = {name: np.concatenate([s[name] for s in slices]) for name in slices[0]}
        same(joined, whole.batch(k))
    for loader in [whole, *parts]:
        loader.close()


def test_a_host_reads_only_its_stretches(store):
    with Loader(store, G, stretches=[(1, 3), (7, 8)]) as loader:
        for k in steps_of(store):
            whole = store.batch(k * G, (k + 1) * G)
            same(loader.batch(k), {name: a[[1, 2, 7]] for name, a in whole.items()})


def test_resume_equals_uninterrupted(store):
    with Loader(store, G) as loader:
        straight = [loader.batch(k) for k in range(30)]
    with Loader(store, G, start_step=17) as resumed:
        for k in range(17, 30):
            same(resumed.batch(k), straight[k])
        same(resumed.batch(2), straight[2])  # back, and forward again
        same(resumed.batch(29), straight[29])


def test_a_bucket_gives_the_same_batches(tmp_path):
    folder = prepared(tmp_path, "written", epochs=1)
    fs = fsspec.filesystem("memory")
    fs.put(str(folder), "/loader-bucket", recursive=True)
    far, near = TokenStore.open("memory://loader-bucket"), TokenStore.open(folder)
    with Loader(far, G, start_step=1) as a, Loader(near, G, start_step=1) as b:
        for k in range(1, 2 * near.epoch_rows // G, 4):
            same(a.batch(k), b.batch(k))
    fs.rm("/loader-bucket", recursive=True)


def test_threads_end_and_waiting_is_counted(store):
    before = threading.active_count()
    with Loader(store, G) as loader:
        for k in range(5):
            loader.batch(k)
        assert loader.input_wait_s > 0
    assert threading.active_count() == before


def test_an_error_reaches_the_caller(tmp_path):
    folder = prepared(tmp_path, "written", epochs=1)
    (folder / "pack/train/books/shard-00000.bin").unlink()
    store = TokenStore.open(folder)
    with Loader(store, G) as loader, pytest.raises(UserError, match="is missing"):
        loader.batch(store.epoch_rows // G)


class Growing:
    """A store that is still being prepared: rows before `end` are there, others are refused."""

    place, verify = SimpleNamespace(readers=1), "sizes"

    def __init__(self, end):
        self.end, self.asked = end, []

    def check_batch(self, size):
        pass

    def there(self, stop):
        return stop <= self.end

    def batch(self, start, stop):
        self.asked.append(start)
        if not self.there(stop):
            raise UserError("not prepared yet")
        return {"tokens": np.arange(start, stop)}


def test_rows_that_are_not_prepared_yet_are_not_asked_for_ahead():
    """Else their refusal would wait for the step that reads them, when they are there."""
    store = Growing(2 * G + 1)
    with Loader(store, G, host=None) as loader:
        loader.batch(0)
        loader._pool.submit(int).result()  # the one thread has done all that it was asked
        assert store.asked == [0, G]
        store.end = 3 * G
        for k in (1, 2):
            np.testing.assert_array_equal(loader.batch(k)["tokens"], np.arange(k * G, k * G + G))
        with pytest.raises(UserError, match="not prepared yet"):
            loader.batch(3)
        store.end = 4 * G
        loader.batch(3)


def test_a_batch_beyond_the_store_is_refused(store):
    with pytest.raises(UserError, match="use a smaller batch"):
        Loader(store, 10**6)
