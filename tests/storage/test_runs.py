"""A run directory in a bucket, through the verbs of the user."""

import json
import uuid
from dataclasses import replace

import jax
import orbax.checkpoint as ocp
import pytest
from aiohttp import ClientPayloadError

from lmwright.checkpoint.saved import SavedStates
from lmwright.cli.main import main
from lmwright.errors import StorageError, UserError
from lmwright.formats.open import load_run
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import CLAIM
from lmwright.storage.mirror import fetched
from lmwright.train.session import train
from tests.flipped import flipped
from tests.resume.small_runs import STEPS, train_in_process
from tests.storage.fake_gcs import BUCKET, Faults

KILL = """
    import os, signal
    from lmwright.train.hooks import HOOKS, Hook
    class Kill(Hook):
        def after_step(self, session, done):
            if done == 8:
                os.kill(os.getpid(), signal.SIGKILL)
    HOOKS.append(Kill())
"""


def losses(url):
    """{step: loss} of a run's metrics as they stand in the bucket."""
    lines = Bucket(url).read("metrics.jsonl")[0].decode().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["loss"] for e in entries if e["kind"] == "train"}


@pytest.fixture
def run(small_run, url):
    return replace(small_run, dir=url)


@pytest.fixture(scope="module")
def local(small_run, tmp_path_factory):
    run = replace(small_run, dir=str(tmp_path_factory.mktemp("local") / "run"))
    train(run, jax.devices()[:1])
    with open(f"{run.dir}/metrics.jsonl") as file:
        entries = [json.loads(line) for line in file]
    return {e["step"]: e["loss"] for e in entries if e["kind"] == "train"}


def test_a_killed_run_in_a_bucket_ends_bit_for_bit_the_same(run, local, capsys):
    killed = train_in_process(run, KILL)
    assert killed.returncode == -9, killed.stderr
    assert Bucket(run.dir).read(CLAIM) is not None
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert losses(run.dir) == local
    assert train(load_run(run.dir), jax.devices()[:1]).step == STEPS  # by its URL alone: done
    names = set(Bucket(run.dir).entries())
    assert {"run.toml", "plan.json", "env.json", "metrics.jsonl", "sessions.json"} <= names
    assert any(name.startswith("tokenizer/") for name in names)
    assert CLAIM not in names and not any(".tmp" in name for name in names)
    assert SavedStates(fetched(run.dir)).steps() == [9, STEPS]


@pytest.fixture(scope="module")
def done(small_run, server, tmp_path_factory):
    """A run that was trained in the bucket from another machine; tests work on copies of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("elsewhere")))
        run = replace(small_run, dir=f"gs://{BUCKET}/done-{uuid.uuid4().hex[:6]}")
        train(run, jax.devices()[:1])
    return run.dir


@pytest.fixture
def trained(done, url):
    """The URL of a copy, as `gcloud storage cp -r` makes it."""
    source, copy = Bucket(done), Bucket(url)
    for name in source.entries():
        copy.write(name, source.read(name)[0])
    return url


def test_every_verb_reads_it_from_another_machine(trained, capsys):
    assert main(["eval", trained]) == 0
    assert "heldout" in capsys.readouterr().out
    assert main(["eval", f"{trained}/checkpoints/9"]) == 0
    assert main(["generate", trained, "--prompt", "abc", "--max-new-tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["report", trained]) == 0
    assert f"report: {trained}/report.html" in capsys.readouterr().out
    assert b"<html" in Bucket(trained).read("report.html")[0]
    assert main(["plan", trained, "--on", "v5e-1", "--quick"]) == 0


def test_export_writes_to_a_bucket_what_transformers_reads(trained, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    out = f"{trained}-hf"
    assert main(["export", trained, out]) == 0
    assert f"{out}: " in capsys.readouterr().out
    bucket = Bucket(out)
    for name in bucket.entries():
        bucket.download(name, tmp_path / "hf" / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.num_parameters() == 25_760
    assert main(["export", trained, out]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert main(["export", trained, out, "--overwrite"]) == 0
    assert main(["export", trained, f"{out}/model.gguf"]) == 0
    assert bucket.read("model.gguf")[0][:4] == b"GGUF"
    text = tmp_path / "text.txt"
    text.write_text("abc def " * 30)
    assert main(["eval", out, "--text", str(text)]) == 0
    assert main(["eval", f"{out}/model.gguf", "--text", str(text)]) == 0
    assert main(["grow", out, f"{out}-grown", "num_layers=3"]) == 0
    grown = Bucket(f"{out}-grown")
    for name in grown.entries():
        grown.download(name, tmp_path / "grown" / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert model.config.num_hidden_layers == 3
    assert main(["vocab", out, f"{out}-larger", "--add", "<x>"]) == 0
    assert {"config.json", "convert.json"} <= set(Bucket(f"{out}-larger").entries())


def test_another_run_is_refused_there(run, trained, capsys):
    other = replace(run, seed=5)
    with pytest.raises(UserError, match=f"dir: {trained} belongs to another run: seed"):
        train(other, jax.devices()[:1])


def test_a_damaged_checkpoint_is_set_aside(run, trained, local, capsys):
    bucket = Bucket(trained)
    name = max((e.size, n) for n, e in bucket.entries(f"checkpoints/{STEPS}/state").items())[1]
    bucket.write(name, flipped(bucket.read(name)[0]))
    with pytest.raises(UserError, match="was altered"):
        SavedStates(fetched(trained)).restore_at(STEPS, lambda shapes: shapes)
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert "checkpoint 12 is damaged" in capsys.readouterr().out
    assert bucket.entries(f"checkpoints.damaged/{STEPS}")
    assert SavedStates(fetched(trained)).steps() == [9, STEPS]
    assert losses(trained) == local


def test_a_copy_on_a_disk_is_checked_by_the_same_hashes(trained, tmp_path, capsys):
    """As `gcloud storage cp -r` makes it, and back again."""
    bucket, copy = Bucket(trained), tmp_path / "copy"
    for name in bucket.entries():
        bucket.download(name, copy / name)
    assert main(["eval", str(copy)]) == 0
    file = next(path for path in (copy / f"checkpoints/{STEPS}/state").rglob("d/*"))
    file.write_bytes(flipped(file.read_bytes()))
    capsys.readouterr()
    assert main(["eval", str(copy)]) == 0
    assert "checkpoint 12 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ClientPayloadError("cut short"), TimeoutError(), OSError()])
def test_trouble_of_the_service_makes_no_checkpoint_damaged(run, trained, monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(ocp.path.step.standard_name_format()), "find_step", fail)
        with pytest.raises(StorageError, match="cannot be read"):
            train(run, jax.devices()[:1])
    assert not Bucket(trained).entries("checkpoints.damaged")
    assert SavedStates(fetched(trained)).steps() == [9, STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("429", "500", "503", "reset"), ("stall",), ("truncate",)])
def test_training_goes_on_under_faults(run, proxy, local, monkeypatch, kinds):
    """One request of ten fails, of every client, while it saves, dies and restores."""
    proxy.faults = Faults(0.1, seed=3, kinds=kinds)
    killed = train_in_process(run, KILL)
    assert killed.returncode == -9, killed.stderr
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert sum(proxy.faults.counts.values()) > 3
    proxy.faults = Faults()
    assert losses(run.dir) == local
    assert SavedStates(fetched(run.dir)).steps() == [9, STEPS]
