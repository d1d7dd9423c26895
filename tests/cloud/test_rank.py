"""What is told of a rank that has ended."""

import asyncio
import signal
import sys
from dataclasses import replace

import pytest

from lmwright.cloud.rank import Rank
from lmwright.cloud.spec import Limits, Spec, save_spec
from lmwright.cloud.watch import BAD_SLICE

# As libtpu ends a process whose chips cannot be reached: a reason, a stack, SIGABRT.
ABORTS = """
import os
print("step 3: fine")
print("F0312 11:02:01.5 204 tpu_client.cc:42] TPU initialization failed: chips 2, 3", flush=True)
print("*** Check failure stack trace: ***")
for n in range(60):
    print(f"    @     0x7f{n:010x}  xla::TpuClient::Frame{n}()")
print('  File "/opt/x.py", line 3 in main', flush=True)
os.abort()
"""
KILLED = "import os, signal; print('step 3: fine', flush=True); os.kill(os.getpid(), {})"


@pytest.fixture
def ended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    spec = Spec(name="j", dir="", command=(), hosts=1, port=0)
    save_spec(spec)

    async def run(code):
        rank = Rank(replace(spec, command=(sys.executable, "-c", code)), 0, 1, "a:1")
        await rank.start()
        ended = await rank.wait()
        return ended, rank.error(ended)

    return lambda code: asyncio.run(run(code))


def test_a_runtime_that_aborts_has_said_why(ended):
    code, error = ended(ABORTS)
    assert code == -6
    assert "TPU initialization failed: chips 2, 3" in error and "Frame" not in error
    assert any(word in error for word in BAD_SLICE)  # so another slice is asked for


@pytest.mark.parametrize("number", [9, 15])
def test_a_rank_that_was_killed_says_nothing(ended, number):
    assert ended(KILLED.format(number)) == (-number, "")


def test_the_sentence_of_an_error_comes_first(ended):
    told = "import sys; print('lmwright: error: model.dim: no such field'); "
    assert ended(told + "print('a hint'); sys.exit(2)") == (
        2,
        "lmwright: error: model.dim: no such field",
    )
    assert ended("import sys; print('warming up'); sys.exit('boom')") == (1, "boom")


SAVES = """
import os, time
from lmwright.guard.heartbeat import beat
beat("save", step=3, saved=2)
time.sleep(60)
"""


def test_a_stopped_process_hangs_whatever_it_was_doing(tmp_path, monkeypatch):
    """A save may take long, and so may nothing that the system has stopped."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    limits = Limits(step_floor_s=0.5)
    spec = Spec(name="j", dir="", command=(), hosts=1, port=0, limits=limits)
    save_spec(spec)

    async def scene():
        rank = Rank(replace(spec, command=(sys.executable, "-c", SAVES)), 0, 1, "a:1")
        await rank.start()
        try:
            while rank.look()["phase"] != "save":
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            assert not rank.look()["hangs"]
            rank.signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            assert rank.look()["hangs"]
            rank.signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert not rank.look()["hangs"]
        finally:
            rank.signal(signal.SIGKILL)
            await rank.wait()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_log_that_was_removed_hides_no_end(ended, tmp_path):
    remove = f"import pathlib; [p.unlink() for p in pathlib.Path({str(tmp_path)!r}).rglob('*.log')]"
    assert ended(f"{remove}; raise SystemExit(3)") == (3, "")
