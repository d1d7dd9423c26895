"""A sweep: every combination is checked first, trained in its own folder, and compared."""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import pytest
import tomli_w

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.train import sweep
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT, StopRequest
from lmwright.train.sweep import Children, members, sweep_command
from tests.quick_compile import FLAGS
from tests.resume.small_runs import environment, in_dir, losses

GRID = """
[sweep.grid]
"model.num_kv_heads" = [4, 1]

[[sweep.cases]]
name = "deep and thin"
"model.num_layers" = 3
"model.embed_dim" = 24
"""


@pytest.fixture
def file(tmp_path, small_run, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAGS)  # the children have one device
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(in_dir(small_run, tmp_path / "runs")) + GRID)
    return path


def test_members(file):
    found = members(file, ["train.steps=3"])
    assert [m.label for m in found] == ["num_kv_heads-4", "num_kv_heads-1", "deep-and-thin"]
    assert [m.run.model.num_kv_heads for m in found] == [4, 1, 2]
    assert (found[2].run.model.num_layers, found[2].run.model.embed_dim) == (3, 24)
    assert {m.run.train.steps for m in found} == {3}
    assert len({m.run.dir for m in found}) == len({m.run.name for m in found}) == 3


def test_a_case_may_set_a_whole_section(file):
    """Another architecture, for one."""
    llama = "kind = 'llama', num_heads = 2, num_kv_heads = 1, head_dim = 8, seq_len = 32"
    sizes = "vocab_size = 320, embed_dim = 16, mlp_dim = 24, num_layers = 1"
    case = f"\n[[sweep.cases]]\nname = 'other'\nmodel = {{{llama}, {sizes}}}\n"
    file.write_text(file.read_text() + case)
    other = members(file)[-1]
    assert (other.label, other.run.model.num_kv_heads) == ("other", 1)
    assert other.run.train == members(file)[0].run.train


@pytest.mark.slow
def test_trained_compared_and_taken_up(file, tmp_path, capfd):
    file.write_text(file.read_text().replace("[4, 1]", "[1]"))
    words = ["train.steps=2", "train.num_microbatches=1", "eval.max_rows=4"]
    assert sweep_command(str(file), words) == 0
    said = capfd.readouterr().out
    page = (tmp_path / "runs" / "report.html").read_text()
    for label in ("num_kv_heads-1", "deep-and-thin"):
        assert f"small-{label}" in page
        assert any(line.startswith(label) and line.count(".") >= 2 for line in said.splitlines())
    again = load_run(tmp_path / "runs" / "deep-and-thin")
    assert again.model.num_layers == 3


def test_one_whose_hours_are_spent_is_compared(file, monkeypatch, capfd):
    codes = iter((EXIT_TIME_SPENT, 1, 0))
    compared = []
    monkeypatch.setattr(sweep, "_train", lambda *_: next(codes))
    monkeypatch.setattr(sweep, "_compare", lambda done, _: compared.extend(m.label for m in done))
    assert sweep_command(str(file)) == 1
    assert compared == ["num_kv_heads-4", "deep-and-thin"]
    said = capfd.readouterr().err
    assert "failed: num_kv_heads-1 " in said
    assert "limits.total_hours are spent before the last step of: num_kv_heads-4;" in said
    codes = iter((0, 0, EXIT_TIME_SPENT))
    assert sweep_command(str(file)) == EXIT_TIME_SPENT


def test_a_full_disk_for_the_report_hides_no_run_that_failed(file, monkeypatch, capsys):
    """The comparison is on the terminal, and the runs are trained."""
    codes = iter((0, 1, 0))
    record = SimpleNamespace(evals={}, train={})

    def full(*_, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sweep, "_train", lambda *_: next(codes))
    monkeypatch.setattr("lmwright.report.read.read_run", lambda _: record)
    monkeypatch.setattr("lmwright.report.summary.summarize", lambda _: {})
    monkeypatch.setattr("lmwright.report.html.read_runs", lambda _: [])
    monkeypatch.setattr("lmwright.report.html.render", lambda _: "page")
    monkeypatch.setattr("lmwright.report.written.write_output", full)
    assert sweep_command(str(file)) == 1
    said = capsys.readouterr().err
    assert "no report: " in said and "free some space, or choose another file: lmwright " in said
    assert "report RUN... -o FILE" in said and "failed: num_kv_heads-1 " in said


def test_the_report_of_a_run_that_trained_where_the_sweep_lies_stays(file, tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr(sweep, "_train", lambda *_: 0)
    monkeypatch.setattr(sweep, "_compare", lambda _, page: pages.append(page))
    assert sweep_command(str(file)) == 0
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.toml").touch()
    assert sweep_command(str(file)) == 0
    assert pages == [f"{tmp_path}/runs/report.html", f"{tmp_path}/runs/sweep.html"]


def test_told_to_stop_it_stops_what_it_runs(file, tmp_path):
    words = [sys.executable, "-m", "lmwright", "sweep", str(file), "train.steps=1000000"]
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "num_kv_heads-4" / "metrics.jsonl"
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.2)
    process.terminate()
    assert process.wait(120) == 42
    assert "continue with: lmwright sweep" in process.stderr.read()
    steps = losses(in_dir(load_run(metrics.parent), metrics.parent))
    assert (metrics.parent / "checkpoints" / str(max(steps))).is_dir()
    with open(metrics.parent / ".lock") as lock:  # nothing trains there any more
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (tmp_path / "runs" / "num_kv_heads-1").exists()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 42)])
def test_a_signal_to_the_sweep_alone_reaches_its_child(number, code):
    child = f"import os, time; os.kill(os.getppid(), {number:d}); time.sleep(60)"
    began = time.monotonic()
    with Children() as children:
        assert children.run([sys.executable, "-c", child]) == children.exit_code == code
    assert time.monotonic() - began < 30


def test_only_a_second_interrupt_gives_up_a_save():
    """A sweep's child gets SIGTERM beside each of the terminal's."""
    with StopRequest() as stop:
        stop.starting = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_one_that_fails_is_named_and_the_others_go_on(file, tmp_path, capfd):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "num_kv_heads-4").write_text("in the way")
    file.write_text(file.read_text().partition("[[sweep.cases]]")[0])
    assert sweep_command(str(file), ["train.steps=1", "train.num_microbatches=1"]) == 1
    assert "failed: num_kv_heads-4" in capfd.readouterr().err
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize(
    "table, says",
    [
        ("", r"has no \[sweep\]"),
        ("[sweep]\nother = 1", r"must hold \[sweep.grid\]"),
        ('[sweep.grid]\n"train.steps" = 3', "sweep.grid.train.steps must be a list"),
        ('[sweep.grid]\n"model.num_kv_head" = [1]', "num_kv_heads"),
        ('[sweep.grid]\n"model.num_kv_heads" = [4, 3]', "not a multiple"),
        ("[[sweep.cases]]\nname = 'a'", "sweep.cases.0 must hold a name and the fields"),
        ("[sweep]\ngrid = 3", r"must hold tables: \[sweep.grid\]"),
        ("[[sweep.cases]]\nname = '../..'\nseed = 1", "'' cannot be the folder of a run"),
        ("[[sweep.cases]]\nname = 'report.html'\nseed = 1", "'report.html' cannot be the folder"),
        ("[[sweep.cases]]\nname = 'a'\ndir = 'b'", "'dir' has no effect in 'a'"),
        ('[sweep.grid]\n"seed" = ' + str(list(range(200))), "makes 200 runs"),
    ],
)
def test_refused_before_anything_starts(file, tmp_path, small_run, table, says):
    file.write_text(dump_toml(in_dir(small_run, tmp_path / "runs")) + table)
    with pytest.raises(UserError, match=says):
        sweep_command(str(file))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "table, says",
    [
        ('[sweep.grid]\n"train.stpes" = [1]', "[sweep.grid], stpes-1: train.stpes is not a field"),
        (
            "[[sweep.cases]]\nname = 'a b'\n'optim.kind' = 'lion'",
            "[[sweep.cases]], a-b: optim.learning_rate is missing, since another optim.kind leaves",
        ),
        (
            "[[sweep.cases]]\nname = 'a'\n'train.num_microbatches' = 3",
            "[[sweep.cases]], a: train.global_batch_size: 4 rows do not divide into 3 microbatches",
        ),
        (
            "[[sweep.cases]]\nname = 'a'\n'data.pack.seq_len' = 64\n'train.num_microbatches' = 3",
            "[[sweep.cases]], a: 2 errors in the run:\n  ",
        ),
    ],
)
def test_an_error_of_a_run_names_the_file_and_its_table(
    file, tmp_path, small_run, capsys, table, says
):
    text = dump_toml(in_dir(small_run, tmp_path / "runs"))
    file.write_text(text + table)
    assert main(["sweep", str(file), "--dry-run"]) == 2
    line = text.count("\n") + 1
    assert capsys.readouterr().err.startswith(f"lmwright: error: {file}:{line}: {says}")
    assert main(["sweep", str(file), "--dry-run", "train.stpes=1"]) == 2
    assert "error: command line: train.stpes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields, says",
    [
        ("'data.pack.seq_len' = 16", "rows hold 32 tokens, and the run needs 16; prepare again"),
        ("'data.pack.attention' = 'row'", "was prepared with other settings: data.pack.attention"),
        ("'train.global_batch_size' = 4000", "train.global_batch_size = 4000, but "),
        ("'data.dir' = 'none'\n'data.pack.seq_len' = 16", ""),
    ],
)
def test_all_runs_are_compared_with_the_data_first(file, tmp_path, capsys, fields, says):
    text = file.read_text().partition("[[sweep.cases]]")[0]
    file.write_text(f"{text}[[sweep.cases]]\nname = 'other'\n{fields}\n")
    assert main(["sweep", str(file), "--dry-run"]) == (2 if says else 0)
    told = capsys.readouterr().err
    assert says in told and ("[[sweep.cases]], other: " in told) == bool(says)
    assert not (tmp_path / "runs").exists()


def test_runs_whose_rows_differ_do_not_share_a_folder_of_data(file, tmp_path, capsys):
    """Also where nothing is prepared: the first one would prepare it as it needs it."""
    lengths = '"data.pack.seq_len" = [32, 16]'
    file.write_text(file.read_text().replace('"model.num_kv_heads" = [4, 1]', lengths))
    assert main(["sweep", str(file), "--dry-run", f"data.dir={tmp_path}/none"]) == 2
    assert "none is for rows of 32 tokens in an earlier run of the" in capsys.readouterr().err


def test_data_that_is_missing_is_prepared_and_schedules_are_fitted_to_it(
    file, tmp_path, monkeypatch
):
    """As `train` does for a run of `train.epochs`, whose steps the data tells."""
    trained = []
    monkeypatch.setattr(Children, "run", lambda _, words: trained.append(load_run(words[-1])) or 0)
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    said = tomllib.loads(file.read_text())
    del said["optim"]["schedule"], said["train"]["steps"]
    said["data"]["dir"] = str(tmp_path / "data")
    said["train"]["epochs"] = 1.0
    file.write_text(tomli_w.dumps({"recipe": "pretrain"} | said))
    assert {m.run.optim.schedule.warmup_steps for m in members(file)} == {500}
    assert sweep_command(str(file)) == 0
    assert [run.optim.schedule.warmup_steps < 100 for run in trained] == [True] * 3


def test_a_field_that_every_run_sets_is_not_overridden(file):
    assert len(members(file, ["model.num_kv_heads=2"])) == 3  # which the case has not
    file.write_text(file.read_text().replace('"model.num_kv_heads" = [4, 1]', "seed = [4, 1]"))
    file.write_text(file.read_text().replace('"model.num_layers" = 3', "seed = 3"))
    with pytest.raises(UserError, match="command line: seed: has no effect"):
        members(file, ["train.steps=3", "seed=5"])


def test_a_session_is_that_of_the_machine(file, tmp_path, capsys, monkeypatch):
    """Its runs share the hours of one, and none is begun without time for it."""
    now = iter([0.0, 1800.0, 5400.0])
    given = []

    def run(children, words):
        given.append(load_run(words[-1]).limits.session_hours)
        return 0

    monkeypatch.setattr(Children, "run", run)
    monkeypatch.setattr("lmwright.train.sweep.time.monotonic", lambda: next(now))
    words = ["limits.session_hours=1.5", "limits.margin_minutes=3"]
    assert sweep_command(str(file), words) == EXIT_SESSION_OVER
    assert given == [1.0]
    again = shlex.join(["lmwright", "sweep", str(file), *words])
    assert f"sweep: stopped; continue with: {again}\n" in capsys.readouterr().err


def test_the_file_of_a_run_is_whole_or_as_before(file, tmp_path, monkeypatch):
    monkeypatch.setattr(Children, "run", lambda _, words: 0)
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    assert sweep_command(str(file)) == 0
    before = (tmp_path / "runs" / "deep-and-thin.toml").read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*num_kv_heads-4\.toml"):
        sweep_command(str(file), ["train.steps=7"])
    assert (tmp_path / "runs" / "deep-and-thin.toml").read_bytes() == before
    assert load_run(tmp_path / "runs" / "num_kv_heads-4.toml").train.steps != 7


def test_other_verbs_point_here(file):
    with pytest.raises(UserError, match="lmwright sweep"):
        load_run(file)
