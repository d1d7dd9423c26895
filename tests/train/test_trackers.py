"""Trackers get what metrics.jsonl gets, and never stop a run."""

import builtins
import struct
import sys
import time
from types import SimpleNamespace

import jax
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from lmwright.cli.main import main
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.train.metrics import MetricsWriter
from lmwright.train.session import train
from lmwright.train.trackers import KINDS
from tests.data.user_run import write_run
from tests.train.bare_run import make_run, read


def events(folder):
    """TFRecords (length, crc, protobuf, crc), parsed by hand, in the order of the files' names."""
    found = []
    for path in sorted(folder.glob("events.*"), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_tensorboard_events_equal_what_was_logged(tmp_path):
    with MetricsWriter(tmp_path, make_run(("tensorboard",)), None) as metrics:
        for step in range(1, 30):
            metrics.log(step, loss=4 / step, tokens_per_s=1000.0 + step)
        metrics.log_eval(29, "wiki", 1.5, 4.5, 0.75, 10)
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events(tmp_path / "tensorboard")
        for value in event.summary.value
    }
    expected = {("train/loss", s): 4 / s for s in range(1, 30)}
    expected |= {("train/tokens_per_s", s): 1000.0 + s for s in range(1, 30)}
    expected |= {("eval/wiki/loss", 29): 1.5, ("eval/wiki/ppl", 29): 4.5}
    expected |= {("eval/wiki/bits_per_byte", 29): 0.75}
    assert scalars == pytest.approx(expected, rel=1e-6)


def test_tensorboard_has_what_was_logged_before_a_checkpoint(tmp_path):
    """A process that is killed then has lost none of it, as metrics.jsonl has not."""

    def there():
        found = events(tmp_path / "tensorboard")
        return [event.step for event in found if event.summary.value]

    with MetricsWriter(tmp_path, make_run(("tensorboard",)), None) as metrics:
        for step in range(1, 9):
            metrics.log(step, loss=4 / step)
        end = time.monotonic() + 20
        while there() != [*range(1, 9)] and time.monotonic() < end:  # a thread passes them on
            metrics.event("checkpoint", step=8)
            time.sleep(0.05)
        assert there() == [*range(1, 9)]


def test_a_tracker_that_fails_at_a_checkpoint_is_left_out(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, make_run(("tensorboard",)), None) as metrics:
        monkeypatch.setattr(SummaryWriter, "flush", None)
        with pytest.warns(UserWarning, match="tensorboard failed at step 2"):
            metrics.event("checkpoint", step=2)
        metrics.event("checkpoint", step=4)
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [2, 4]


def test_tensorboard_is_told_which_points_a_resume_replaces(tmp_path):
    MetricsWriter(tmp_path, make_run(("tensorboard",)), None).close()
    before = len(events(tmp_path / "tensorboard"))
    MetricsWriter(tmp_path, make_run(("tensorboard",)), 40).close()
    starts = [e for e in events(tmp_path / "tensorboard")[before:] if e.HasField("session_log")]
    assert [(e.step, e.session_log.status) for e in starts] == [(41, SessionLog.START)]


class FakeTracker:
    """Stands for wandb and for trackio: both have init, log and finish."""

    def __init__(self):
        self.inits, self.logged, self.finished = [], [], 0

    def init(self, **kwargs):
        self.inits.append(kwargs)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_optional_tracker_gets_values_and_keeps_its_run(tmp_path, monkeypatch, name):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, name, fake)
    run = make_run((name,), project="pods")
    with MetricsWriter(tmp_path, run, None) as metrics:
        metrics.log(1, loss=2.0)
        metrics.log_eval(1, "wiki", 3.0, 20.0, None, 7)
    with MetricsWriter(tmp_path, run, 1) as metrics:
        metrics.log(2, loss=1.0)
    with MetricsWriter(tmp_path, run, None):
        pass  # starts over: another run at the tracker
    assert fake.logged == [
        (1, {"train/loss": 2.0}),
        (1, {"eval/wiki/loss": 3.0, "eval/wiki/ppl": 20.0}),
        (2, {"train/loss": 1.0}),
    ]
    assert fake.finished == 3
    key = "id" if name == "wandb" else "name"
    first, resumed, anew = [call[key] for call in fake.inits]
    assert first == resumed != anew
    assert fake.inits[0]["project"] == "pods" and fake.inits[0]["resume"] == "allow"
    assert fake.inits[0]["config"]["train"]["steps"] == 10


def test_both_trackers_go_on_in_the_runs_that_they_began(tmp_path, monkeypatch):
    """The second one that is opened took the id of the first, which had another run from then
    on."""
    fakes = {name: FakeTracker() for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    run = make_run(("wandb", "trackio"))
    for step in (None, 1, None):
        MetricsWriter(tmp_path, run, step).close()
    for name, key in (("wandb", "id"), ("trackio", "name")):
        first, resumed, anew = [call[key] for call in fakes[name].inits]
        assert first == resumed != anew


def test_wandb_sees_no_credentials_in_the_command(tmp_path, monkeypatch):
    """It keeps the arguments of the process in what it uploads."""
    fake, seen = FakeTracker(), []
    monkeypatch.setattr(fake, "init", lambda **_: seen.extend(sys.argv))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    override = "data.sources=[{path='https://user:pa55@host/a.jsonl?token=s3cret'}]"
    monkeypatch.setattr(sys, "argv", ["lmwright", "train", "run.toml", override])
    KINDS["wandb"](tmp_path, make_run(("wandb",)), None)
    assert seen[:3] == sys.argv[:3] and "host/a.jsonl" in seen[3]
    assert "pa55" not in seen[3] and "s3cret" not in seen[3]
    assert sys.argv[3] == override


def test_trackio_is_not_given_again_what_it_has(tmp_path, monkeypatch):
    """It keeps all points of a step; the last one that it has may lack some."""
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    run = make_run(("trackio",))
    MetricsWriter(tmp_path, run, None).close()
    fake._next_step = 8  # a process that was killed behind step 7
    with MetricsWriter(tmp_path, run, 5) as metrics:
        for step in range(6, 10):
            metrics.log(step, loss=1.0)
    assert [step for step, _ in fake.logged] == [7, 8, 9]
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [6, 7, 8, 9]


@pytest.fixture
def without(monkeypatch):
    """Lets a package seem not to be installed."""
    real = builtins.__import__

    def leave_out(name):
        def other(module, *args, **kwargs):
            if module == name:
                raise ImportError(module)
            return real(module, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", other)

    return leave_out


RUN_FILE = """\
recipe = "quickstart"
name = "tiny"
dir = "run"
data = {dir = "data", sources = [{path = "a.txt"}]}
"""


def test_a_run_whose_tracker_is_missing_leaves_nothing_behind(
    tmp_path, monkeypatch, without, capsys
):
    """Neither data nor a run directory, which would belong to another run without the tracker."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    without("wandb")
    words = ["train", "run.toml", "metrics.trackers=['tensorboard', 'wandb']"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "error: metrics.trackers: wandb is not installed; run `pip install" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "run.toml"]
    assert main(["prepare", "run.toml"]) == 0  # and a host of several trains without preparing
    with pytest.raises(UserError, match="wandb is not installed"):
        train(load_run("run.toml", words[2:]), jax.devices()[:1])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_tracker_names_the_extra_and_leaves_nothing_open(tmp_path, without, name):
    without(name)
    with pytest.raises(UserError, match=rf"pip install -e '\.\[{name}\]'"):
        MetricsWriter(tmp_path, make_run((name,)), None)


def test_tracker_that_does_not_start_is_a_user_error(tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise RuntimeError("no api key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"metrics\.trackers: wandb did not start: no api key"):
        MetricsWriter(tmp_path, make_run(("tensorboard", "wandb")), None)


def test_a_start_that_failed_does_not_keep_the_directory(tmp_path, monkeypatch):
    """Nothing was trained there, so that other settings take its place, whatever they are."""

    def refuse(**kwargs):
        raise RuntimeError("no api key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["train", "run.toml", "metrics.trackers=['wandb']"]) == 2
    assert (tmp_path / "run" / "run.toml").exists()
    other = ["optim.learning_rate=0.5", "data.dir=other", "data.tokenizer.vocab_size=290"]
    assert main(["prepare", "run.toml", *other]) == 0
    assert main(["train", "run.toml", *other]) == 0
    assert load_run(tmp_path / "run" / "run.toml", []).optim.learning_rate == 0.5
    assert load_tokenizer(tmp_path / "run" / "tokenizer").vocab_size == 290
    assert main(["train", "run.toml", *other, "optim.learning_rate=0.25"]) == 2  # it has trained


def test_data_of_a_start_that_failed_is_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["train", "run.toml", "metrics.trackers=['wandb']"]) == 2
    capsys.readouterr()
    assert main(["train", "run.toml", "data.holdout_fraction=0.3"]) == 2
    assert "data.holdout_fraction is 0.1 there and 0.3 here" in capsys.readouterr().err


def test_a_run_that_goes_on_does_so_without_a_tracker_that_does_not_start(tmp_path, monkeypatch):
    """A supervisor would take the exit code of a wrong setting for the end of the job."""
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = make_run(("wandb", "tensorboard"))
    with MetricsWriter(tmp_path, run, None) as metrics:
        metrics.log(1, loss=1.0)
    monkeypatch.setattr(fake, "init", None)
    with pytest.warns(UserWarning, match="wandb did not start and is not used in this session"):
        metrics = MetricsWriter(tmp_path, run, 1)
    with metrics:
        metrics.log(2, loss=2.0)
    assert [line["loss"] for line in read(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    told = [event.step for event in events(tmp_path / "tensorboard") if event.summary.value]
    assert told == [1, 2] and len(fake.logged) == 1


def test_tracker_that_fails_later_is_left_out(tmp_path, monkeypatch):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with MetricsWriter(tmp_path, make_run(("trackio",)), None) as metrics:
        metrics.log(1, loss=1.0)
        fake.log = None
        with pytest.warns(UserWarning, match="trackio failed at step 2"):
            metrics.log(2, loss=2.0)
        metrics.log(3, loss=3.0)
    assert [line["loss"] for line in read(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
