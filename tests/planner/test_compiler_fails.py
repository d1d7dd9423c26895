"""A TPU compiler that crashes ends `lmwright plan` with one sentence: the slice, how it ended and
what it said last."""

from functools import partial

import pytest

from lmwright.cli.main import main
from lmwright.planner import command
from lmwright.planner.compiler import compile as aot
from tests.planner.runs import run_of

CHECK = (
    "F0000 00:00:1761000000.0 7 layout.cc:12] Check failed: a == b (1 vs. 2)\n"
    "*** Check failure stack trace: ***\n    @ 0x55d0 (unknown)"
)
DIES = "import os, signal, sys; print({text!r}, file=sys.stderr, flush=True); {end}"
SIGNAL = "os.kill(os.getpid(), signal.{})"
CASES = {
    "SIGSEGV": ("", SIGNAL.format("SIGSEGV"), "crashed with SIGSEGV and said nothing"),
    "SIGBUS": ("warming up", SIGNAL.format("SIGBUS"), "crashed with SIGBUS and said: warming up;"),
    "SIGABRT": (
        CHECK,
        "os.abort()",
        "crashed with SIGABRT and said: F0000 00:00:1761000000.0 7 layout.cc:12] Check failed: ",
    ),
    "as a shell says it": ("", "os._exit(139)", "crashed with SIGSEGV and said nothing"),
    "LLVM": (
        "LLVM ERROR: Cannot select: intrinsic",
        "os._exit(1)",
        "crashed with exit code 1 and said: LLVM ERROR: Cannot select: intrinsic; change the mesh",
    ),
    "a long text": ("LLVM ERROR: " + "x" * 5000, "os._exit(1)", "said: LLVM ERROR: xxx"),
}


def dying(monkeypatch, text, end):
    program = ("-c", DIES.format(text=text, end=end))
    monkeypatch.setattr(aot, "require_libtpu", lambda: None)
    monkeypatch.setattr(command, "has_libtpu", lambda: True)
    monkeypatch.setattr(command, "compile_for", partial(aot.compile_for, program=program))


@pytest.mark.parametrize("case", CASES)
def test_a_crash_is_one_sentence(case, tmp_path, capsys, monkeypatch):
    text, end, wanted = CASES[case]
    dying(monkeypatch, text, end)
    run_of(tmp_path)
    assert main(["plan", str(tmp_path / "run.toml"), "--on", "v4-32"]) == 2
    out, err = capsys.readouterr()
    said = err.splitlines()[-1]
    assert out == "" and "Traceback" not in err and len(said) < 800
    assert said.startswith("lmwright: error: v4-32: the TPU compiler crashed with ")
    assert wanted in said and said.endswith("or ask with --quick")
    assert [line for line in err.splitlines() if "error" in line.lower()] == [said]


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    dying(monkeypatch, "", "raise KeyError('weights')")
    run_of(tmp_path)
    with pytest.raises(RuntimeError, match=r"Traceback[^$]*KeyError: 'weights'"):
        main(["plan", str(tmp_path / "run.toml"), "--on", "v4-32"])
