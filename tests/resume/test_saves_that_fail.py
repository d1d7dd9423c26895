"""A disk that is full for a while costs a message and no step; a run that goes on without a
checkpoint for long would lose its work, so a disk that stays full ends it."""

import errno
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lmwright.checkpoint import store
from lmwright.checkpoint.files import LocalRoot
from lmwright.checkpoint.store import MOST_FAILURES
from lmwright.config.run import Checkpoint
from lmwright.train.command import train
from tests.resume.small_runs import in_dir, train_in_process

FULL_FROM_STEP_4 = """
    import os, resource, threading, time
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # all tests share it: no cut file there
    from types import SimpleNamespace
    from lmwright.checkpoint import store
    from lmwright.train.hooks import HOOKS, Hook
    def limit(size):  # no file can become longer, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    class Trouble(Hook):
        def before_save(self, session, step):
            if step == 4:
                limit(9000)
    pauses, slow = [], []
    def start(thread, start=threading.Thread.start):
        run = thread.run
        if thread.name == "json_ch_save" and not slow:  # still writes when the others have failed
            slow.append(thread)
            thread.run = lambda: (time.sleep(1), run())
        start(thread)
    threading.Thread.start = start
    def sleep(seconds):
        pauses.append(seconds)
        print("a thread of the failed save is", "alive" if slow[0].is_alive() else "gone")
        if len(pauses) == {pauses}:
            limit(resource.RLIM_INFINITY)
    store.time = SimpleNamespace(sleep=sleep, monotonic=store.time.monotonic)
    HOOKS.append(Trouble())
"""


SLOW = pytest.mark.slow  # as long as the other


@pytest.mark.parametrize(
    "pauses",
    [pytest.param(1, marks=SLOW), MOST_FAILURES, pytest.param(MOST_FAILURES + 1, marks=SLOW)],
)
def test_a_disk_that_is_full_for_a_while(small_run, tmp_path, pauses):
    policy = Checkpoint(save_every_steps=4, keep_last=20)
    run = in_dir(replace(small_run, checkpoint=policy), tmp_path / "run")
    done = train_in_process(run, FULL_FROM_STEP_4.format(pauses=pauses))
    said = done.stdout + done.stderr
    assert "the checkpoint could not be written (" in said and "trying again in 2 s" in said
    assert "thread of the failed save is gone" in said and "save is alive" not in said
    names = [path.name for path in (Path(run.dir) / "checkpoints").iterdir()]
    kept = sorted(int(name) for name in names if name.isdigit())
    if pauses > MOST_FAILURES:  # the last is the error
        assert done.returncode and not kept
        assert "free some space or correct the folder's permissions and run again" in said
        return
    assert done.returncode == 0, said
    assert kept[-1] == run.train.steps and all(
        json.loads((Path(run.dir) / f"checkpoints/{step}/hashes.json").read_text()) for step in kept
    )
    assert train(run, jax.devices()[:1]).step == run.train.steps


def test_a_folder_that_cannot_be_made_for_a_while(small_run, tmp_path, monkeypatch):
    """Threads of Orbax that wait for the folder hold neither the run nor its end."""
    run, pauses = in_dir(small_run, tmp_path / "run"), []
    make, before = os.mkdir, set(threading.enumerate())

    def mkdir(path, *rest, **named):
        if "orbax-checkpoint-tmp" in str(path) and len(pauses) < 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, *rest, **named)

    monkeypatch.setattr(os, "mkdir", mkdir)
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr(store, "time", clock)
    assert train(run, jax.devices()[:1]).step == run.train.steps
    assert pauses == [2, 4]
    assert not [left for left in set(threading.enumerate()) - before if not left.daemon]


ONE_LINE = """
    import os, resource, signal, sys
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # all tests share it: no cut file there
    from types import SimpleNamespace
    from lmwright.checkpoint import store
    from lmwright.train.hooks import HOOKS, Hook
    store.time = SimpleNamespace(sleep=lambda _: None, monotonic=store.time.monotonic)
    class Trouble(Hook):
        def before_save(self, session, step):
            if {full}:  # no file can become longer, as on a full disk
                resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        def after_save(self, session, step):
            if not {full}:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
    HOOKS.append(Trouble())
    from lmwright.cli.main import main
    raise SystemExit(main(["train", {file!r}]))
"""


@pytest.mark.parametrize(
    "full, code", [(True, 2), pytest.param(False, 130, marks=pytest.mark.slow)]
)
def test_a_save_that_fails_or_is_given_up_is_one_line(small_run, tmp_path, full, code):
    run = in_dir(small_run, tmp_path / "run")
    file = str(Path(run.dir).with_suffix(".toml"))
    done = train_in_process(run, ONE_LINE.format(full=full, file=file))
    assert done.returncode == code
    said = [line for line in done.stderr.splitlines() if line and "compilation cache" not in line]
    assert len(said) == 1 and said[0].startswith("lmwright: "), done.stderr
    if full:
        assert "File too large" in said[0] or "could not be written" in said[0]
        assert "Traceback" in (Path(run.dir) / "log.txt").read_text()
    assert train(run, jax.devices()[:1]).exit_code == 0


def test_what_a_thread_still_writes_to_is_removed(tmp_path):
    """Of a save that failed, which is done again: a file that comes while its folder goes."""
    root = LocalRoot(tmp_path)
    folder = root.path / "4.orbax-checkpoint-tmp"
    folder.mkdir(parents=True)
    done = threading.Event()

    def write():
        for number in range(3000):
            with suppress(OSError):
                (folder / f"{number}").write_text("x")
        done.set()

    threading.Thread(target=write).start()
    root.remove(root.unfinished()[0])
    done.wait()
    assert not folder.exists()
