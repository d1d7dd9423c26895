"""metrics.jsonl survives kills, and a resumed run's file is that of a run never stopped."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.errors import UserError
from lmwright.train.metrics import MetricsWriter, truncate_after
from tests.train.bare_run import make_run, read


def without_time(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in read(path)]


def line_of(step, **fields):
    """One line of an event, as the writer ends it."""
    return json.dumps({"step": step, "time": 1.7e9, "kind": "note", **fields}).encode() + b"\n"


def write_steps(folder, first, last, resume_step, eval_every):
    """What the loop does: one line a step, evaluations after it."""
    with MetricsWriter(folder, make_run(), resume_step) as metrics:
        for step in range(first, last + 1):
            metrics.log(step, loss=8 / step, learning_rate=1e-3 * step)
            if step % eval_every == 0:
                metrics.log_eval(step, "wiki \u00e9", 7 / step, 2.5, 1.25, 100 + step)
                metrics.log_samples(step, [{"prompt": "a\n", "text": f"\u2028{step}"}])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_killed_anywhere_and_resumed_equals_uninterrupted(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    eval_every = data.draw(st.integers(1, 4), label="eval_every")
    killed_at = data.draw(st.integers(1, 9), label="killed_at")
    write_steps(folder / "whole", 1, 9, None, eval_every)
    write_steps(folder / "killed", 1, killed_at, None, eval_every)
    path = folder / "killed" / "metrics.jsonl"
    content = path.read_bytes()
    # A kill cuts the file in the middle of what comes after the checkpoint it resumes from.
    resume_step = data.draw(st.integers(0, killed_at - 1), label="resume_step")
    kept = [line for line in content.splitlines(True) if json.loads(line)["step"] <= resume_step]
    safe = len(b"".join(kept))
    cut = data.draw(st.integers(0, 2000), label="cut") % (len(content) - safe + 1)
    path.write_bytes(content[: safe + cut])

    write_steps(folder / "killed", resume_step + 1, 9, resume_step, eval_every)

    assert without_time(path) == without_time(folder / "whole" / "metrics.jsonl")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 20), max_size=12).map(sorted),
    resume_step=st.none() | st.integers(0, 20),
    torn=st.binary(max_size=30).filter(lambda b: b"\n" not in b and not b.strip().endswith(b"}")),
)
def test_truncation_keeps_exactly_the_lines_up_to_the_step(
    tmp_path_factory, steps, resume_step, torn
):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [line_of(step, n=n) for n, step in enumerate(steps)]
    path.write_bytes(b"".join(lines) + torn)
    truncate_after(path, resume_step)
    last = -1 if resume_step is None else resume_step
    expected = [line for line, step in zip(lines, steps, strict=True) if step <= last]
    assert path.read_bytes() == b"".join(expected)
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line_of(1) + line_of(2).rstrip())
    assert truncate_after(path, 2) is None
    assert path.read_bytes() == line_of(1) + line_of(2)


@pytest.mark.parametrize("bad", [b"{torn", b"[1]", b'{"loss": 1}', b'{"step": true}', b"\0\0"])
def test_damage_before_the_last_line_is_named_and_kept_apart(tmp_path, bad, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line_of(1) + bad + b"\n" + line_of(3))
    MetricsWriter(tmp_path, make_run(), 3).close()
    said = f"{path}: line 2 is damaged and is now in metrics.jsonl.damaged; training continues "
    assert capsys.readouterr().out == said + "from step 3\n"
    assert path.read_bytes() == line_of(1) + line_of(3)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == bad + b"\n"


def test_a_file_that_ends_before_its_checkpoint_is_named_only_where_a_line_was_due(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line_of(1) + line_of(10))
    assert truncate_after(path, 19, log_every_steps=10) is None
    said = truncate_after(path, 20, log_every_steps=10)
    assert said.startswith(f"{path}: ends at step 10, so the measurements after step 10 are")


def test_a_run_that_is_done_writes_its_last_evaluation_once(tmp_path):
    write_steps(tmp_path, 1, 4, None, eval_every=2)
    before = read(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path, make_run(), 4) as metrics:
        metrics.log_eval(4, "wiki \u00e9", 7 / 4, 2.5, 1.25, 104)
        metrics.log_samples(4, [{"prompt": "a\n", "text": "\u20284"}])
        assert read(tmp_path / "metrics.jsonl") == before
        metrics.log_eval(4, "wiki \u00e9", 7.5 / 4, 2.5, 1.25, 104)  # on other devices, say
    assert read(tmp_path / "metrics.jsonl")[:-1] == before


def test_a_run_that_is_done_writes_nothing_of_an_adapter_that_ended_earlier(tmp_path):
    with MetricsWriter(tmp_path, make_run(), None) as metrics:
        for step, names in ((2, "ab"), (4, "b")):
            for name in names:
                metrics.log_eval(step, f"{name}/wiki", 1.5, 2.5, 1.25, 104)
    before = read(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path, make_run(), 4) as metrics:
        metrics.log_eval(4, "a/wiki", 1.5, 2.5, 1.25, 104)
        assert read(tmp_path / "metrics.jsonl") == before
        metrics.log_eval(6, "a/wiki", 1.25, 2.5, 1.25, 104)  # it has more steps now
    assert read(tmp_path / "metrics.jsonl")[:-1] == before


def test_sigkill_loses_no_finished_line(tmp_path):
    script = (
        "import sys\n"
        "from tests.train.bare_run import make_run\n"
        "from lmwright.train.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1], make_run(), None, process_index=0)\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1; w.log(step, loss=1.0 / step); print(step, flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    said = 0
    for line in child.stdout:
        said = int(line)
        if said == 200:
            child.send_signal(signal.SIGKILL)
            break
    child.stdout.close()
    child.wait()
    MetricsWriter(tmp_path, make_run(), 10**9).close()
    steps = [line["step"] for line in read(tmp_path / "metrics.jsonl")]
    assert said == 200 and steps == list(range(1, len(steps) + 1)) and len(steps) >= said


def test_lines_are_strict_json_with_times(tmp_path):
    with MetricsWriter(tmp_path, make_run(), None) as metrics:
        metrics.log(3, loss=float("nan"), grad_norm=float("inf"), low=float("-inf"))
        metrics.event("checkpoint", step=3, blocked_s=0.25)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = [json.loads(line, parse_constant=refuse) for line in lines]
    assert first["time"] > 1.7e9 and first["kind"] == "train"
    assert (first["loss"], first["grad_norm"], first["low"]) == ("NaN", "Infinity", "-Infinity")
    assert (second["kind"], second["step"], second["blocked_s"]) == ("checkpoint", 3, 0.25)


def test_floats_are_written_exactly(tmp_path):
    values = [1 / 3, 1e-300, 2.0**-1074, 3.4512345790863037, 123456789012345.67]
    with MetricsWriter(tmp_path, make_run(), None) as metrics:
        for step, value in enumerate(values):
            metrics.log(step, loss=value)
    assert [line["loss"] for line in read(tmp_path / "metrics.jsonl")] == values


def test_other_processes_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", make_run(("tensorboard",)), None, process_index=1) as m:
        m.log(1, loss=1.0)
        m.event("resume", step=1)
    assert not (tmp_path / "run").exists()


def test_reserved_names_are_refused(tmp_path):
    with MetricsWriter(tmp_path, make_run(), None) as metrics:
        with pytest.raises(ValueError, match="time"):
            metrics.log(1, time=3.0)
        with pytest.raises(ValueError, match="not an event"):
            metrics.event("train", step=1)


@pytest.fixture
def full(tmp_path):
    """A writer with one line, on a disk that has room for half of the next one, and its size."""
    metrics = MetricsWriter(tmp_path, make_run(), None)
    metrics.log(1, loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    yield metrics, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)), size
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_a_full_disk(full, tmp_path):
    metrics, freed, _ = full
    with pytest.warns(UserWarning, match=r"jsonl: the disk is full; its lines wait") as told:
        metrics.log(2, loss=2.0)
        metrics.log(3, loss=3.0)
        metrics.event("checkpoint", step=3)
    assert len(told) == 1
    freed()
    metrics.log(4, loss=4.0)
    metrics.close()
    lines = [(line["step"], line["kind"]) for line in read(tmp_path / "metrics.jsonl")]
    assert lines == [(1, "train"), (2, "train"), (3, "train"), (3, "checkpoint"), (4, "train")]


def test_half_a_line_of_a_disk_that_stays_full_is_repaired(full, tmp_path):
    metrics, freed, size = full
    with pytest.warns(UserWarning, match="full to the end, lines lost: 1"):
        metrics.log(2, loss=2.0)
        metrics.close()
    assert (tmp_path / "metrics.jsonl").stat().st_size == size + 20
    freed()
    MetricsWriter(tmp_path, make_run(), 2).close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"run/metrics\.jsonl: cannot be written"):
        MetricsWriter(tmp_path / "run", make_run(), None)
