"""`train --rehearse`: the first steps of a run, in a folder of their own, and a checklist."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.models.modernbert import ModernBert
from lmwright.models.reasoning import Reasoning
from lmwright.planner.checklist import Check, fits_check
from lmwright.train import command, rehearsal, rehearsal_checks
from lmwright.train.session import train
from tests.in_memory import export_hf
from tests.labeled_run import SIZES
from tests.resume.small_runs import in_dir, losses, typed
from tests.saved_run import weights_at


@pytest.fixture
def run(small_run, tmp_path, monkeypatch):
    """A run file in the current folder, whose commands take one device."""
    monkeypatch.chdir(tmp_path)
    run = in_dir(small_run, tmp_path / "run")
    Path("run.toml").write_text(dump_toml(run))
    one = jax.devices()[:1]
    monkeypatch.setattr(rehearsal, "rehearse", partial(rehearsal.rehearse, devices=one))
    monkeypatch.setattr(command, "train", lambda run, **k: train(run, one, **k))
    return run


def lines(text):
    """Name to (verdict, evidence) of the checklist in a text."""
    pattern = r"^  (yes|no|not known) +(\S.*?)(?: {2,}|$)(.*)$"
    return {m[2].strip(): (m[1], m[3]) for m in re.finditer(pattern, text, re.M)}


def test_a_rehearsal_shows_what_holds_and_leaves_nothing(run, capsys):
    pytest.importorskip("transformers")
    assert main(["train", "run.toml", "--rehearse"]) == 0
    said = lines(capsys.readouterr().out)
    assert list(said) == [
        "loads", "fits", "loss falls", "speed", "resumes", "export", "writes text"
    ]  # fmt: skip
    assert {name for name, (holds, _) in said.items() if holds != "yes"} <= {"speed"}
    assert "steps 6 to 10 after a restore" in said["resumes"][1]
    assert "opens in transformers" in said["export"][1]
    assert sorted(Path().iterdir()) == [Path("run.toml")]


@pytest.mark.parametrize(
    "kind, names", [("dpo", ["reward_margin"]), ("kto", ["reward_chosen", "reward_rejected"])]
)
def test_preferences_are_judged_by_their_rewards(kind, names):
    """The loss of what is held out is that of chosen answers, which may well rise."""
    told = SimpleNamespace(objective=SimpleNamespace(kind=kind))
    line = lambda *values: SimpleNamespace(values=values)  # noqa: E731
    rewards = dict(zip(names, (line(0.0, 0.4), line(0.0, -0.2)), strict=False))
    held_out = {"pairs": {"loss": line(9.1, 9.4), **rewards}}
    falls = lambda evals: rehearsal_checks._falls(told, SimpleNamespace(train={}, evals=evals))  # noqa: E731
    assert falls(held_out).holds
    assert f"margin 0.0000, then {0.4 if kind == 'dpo' else 0.6:.4f}" in falls(held_out).evidence
    worse = {name: line(*curve.values[::-1]) for name, curve in held_out["pairs"].items()}
    assert falls({"pairs": worse}).holds is False
    assert falls({"pairs": {"loss": line(9.1, 9.4)}}).holds is None


def test_nothing_is_trained_if_something_does_not_hold(run, capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "file_checks", lambda *_: [Check("export", False, "as set")])
    assert main(["train", "run.toml", "--rehearse", "go"]) == 2
    assert "not all of the checklist holds" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == [Path("run.toml")]


@pytest.mark.slow
def test_go_trains_the_same_run(run, capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "file_checks", lambda *_: [Check("export", True, "as set")])
    words = ["train", "run.toml", "--rehearse", "go", "train.steps=10"]
    assert main(words) == 0
    assert not Path("run.rehearsal").exists() and load_run("run").train.steps == 10
    straight = replace(run, dir="straight", train=replace(run.train, steps=10))
    train(straight, jax.devices()[:1])
    assert losses(straight) == losses(run)
    assert main([*words, "train.steps=11"]) == 0
    assert "continues without a rehearsal" in capsys.readouterr().out


def test_other_bits_after_a_restore_are_found():
    sums = np.arange(12, dtype=np.uint32).reshape(2, 6)
    first, again = (rehearsal.Take(10, leaves=False, sums=sums.copy()) for _ in range(2))
    assert rehearsal.resume_check(first, again, 5).holds
    again.sums[1, 4] ^= 1
    check = rehearsal.resume_check(first, again, 5)
    assert check.holds is False and "in 1 of 6 arrays" in check.evidence


def test_a_smaller_machine_is_refused(run, capsys):
    assert main(["train", "run.toml", "--rehearse", "plan.on=v4-32"]) == 2
    assert "planned for v4-32, 16 devices" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == [Path("run.toml")]
    one = jax.devices()[:1]
    rehearsal.refuse_smaller(replace(run, plan=replace(run.plan, on="cpu:64")), one)


class Device:
    """A device as a TPU or GPU tells of its memory."""

    platform, device_kind = "tpu", "TPU v4"

    def __init__(self, limit_bytes):
        self._limit_bytes = limit_bytes

    def memory_stats(self):
        return {"bytes_limit": self._limit_bytes, "peak_bytes_in_use": 1}


def test_memory_of_devices(run):
    planned = replace(run, plan=replace(run.plan, on="v4-32"))
    rehearsal.refuse_smaller(planned, [Device(33_000_000_000)] * 16)
    for devices, told in (
        ([Device(33_000_000_000)] * 8, "16 devices, and this machine has 8 x TPU v4"),
        ([Device(16 * 2**30)] * 16, "of v4-32 has 30.8 GiB, and one of 16 x TPU v4 .* 16.0 GiB"),
    ):
        with pytest.raises(UserError, match=told):
            rehearsal.refuse_smaller(planned, devices)
    check = fits_check(12 * 2**30, 16 * 2**30, fits=True)
    assert check.holds and check.evidence == "12.00 of 16.00 GiB, 4.00 GiB to spare"
    check = fits_check(17 * 2**30, 16 * 2**30, fits=False)
    assert check.holds is False and "1.00 GiB too much" in check.evidence


def test_a_device_that_runs_out_of_memory_does_not_fit(run, capsys, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 9.00G")

    monkeypatch.setattr(rehearsal, "train", full)
    assert main(["train", "run.toml", "--rehearse", "go"]) == 2
    out, err = capsys.readouterr()
    assert lines(out) == {"fits": ("no", "RESOURCE_EXHAUSTED: Attempting to allocate 9.00G")}
    assert "nothing was trained" in err and sorted(Path().iterdir()) == [Path("run.toml")]


def test_a_word_may_be_left_out(run, capsys):
    words = ["--rehearse", "run.toml", "plan.on=v4-32"]
    assert main(["train", *words]) == 2
    assert "planned for v4-32" in capsys.readouterr().err
    launch = ["launch", "run.toml", "--rehearse"]
    assert main([*launch, "--on", "local:2x1", "--dry-run"]) == 0
    assert "--rehearse=stop" in capsys.readouterr().out
    assert main([*launch, "go", "--on", "local:2x1", "--dry-run"]) == 0
    assert "--rehearse=go" in capsys.readouterr().out
    assert main([*launch, "--on", "kaggle"]) == 2
    assert "cannot be launched with --on kaggle" in capsys.readouterr().err
    assert main([*launch, "--on", "local:1x1", "--do", "eval"]) == 2
    assert "only training is rehearsed" in capsys.readouterr().err


def test_a_slice_smaller_than_planned_is_refused_before_it_is_paid_for(run, capsys):
    places = ["dir=gs://some-bucket/run", "data.dir=gs://some-bucket/data", "plan.on=v4-32"]
    where = ["--on", "v4-32,v4-8", "--zone", "us-central2-b", "--project", "p", "--dry-run"]
    assert main(["launch", "run.toml", *places, *where, "--rehearse"]) == 2
    assert "--rehearse: v4-8 has 4 devices, and plan.on = 'v4-32' has 16" in capsys.readouterr().err


def test_the_plan_ends_with_what_is_known_without_the_machine(run, trained_run, capsys):
    origin = [f"train.init_from={trained_run.dir}", f"data.tokenizer.path={run.data.dir}/tokenizer"]
    sized = [
        "train.global_batch_size=16",
        *origin,
        "plan.on=v5e-8",
        "data.tokenizer.vocab_size=none",
    ]
    assert main(["plan", "run.toml", "--quick", *sized]) == 0
    said = lines(capsys.readouterr().out)
    assert said["data loads"] == ("yes", f"{epoch_rows(run):,} rows of 32 tokens")
    assert said["weights load"][0] == "yes" and said["fits"][0] == "yes"
    assert "GiB to spare" in said["fits"][1] and said["resumes"][0] == "not known"
    assert main(["plan", "run.toml", "--quick", *sized, "data.pack.seq_len=16"]) == 0
    said = lines(capsys.readouterr().out)["data loads"]
    assert said[0] == "no" and "rows hold 32 tokens, and the run needs 16" in said[1]
    assert main(["export", trained_run.dir, "bare"]) == 0
    Path("bare/model.safetensors").unlink()
    capsys.readouterr()
    assert main(["plan", "run.toml", "--quick", *sized, "train.init_from=bare"]) == 0
    assert lines(capsys.readouterr().out)["weights load"][0] == "not known"
    assert main(["plan", "run.toml", "--quick", *sized, "model.mlp_dim=64"]) == 0
    assert lines(capsys.readouterr().out)["weights load"][0] == "no"


def test_a_plan_tells_that_an_encoder_loads_without_its_head(run, capsys):
    model = ModernBert(**SIZES | {"num_kv_heads": 4, "mlp_dim": 24})
    tokenizer = Path(run.data.dir, "tokenizer")
    export_hf(model, weights_at(1, model.spec()), tokenizer, "encoder")
    text = """
        recipe = "finetune-classifier"
        name = "classes"
        dir = "classes"
        objective.labels = ["good", "bad"]
        train = {init_from = "encoder", steps = 2, global_batch_size = 8}
        data = {dir = "labeled", pack.seq_len = 32, sources = [{path = "a.csv", rows = "labeled"}]}
    """
    Path("classes.toml").write_text(text)
    for words in ([], ["lora.rank=4"]):
        assert main(["plan", "classes.toml", "--quick", "--on", "v5e-8", *words]) == 0
        assert lines(capsys.readouterr().out)["weights load"][0] == "yes"
    wider = "model.mlp_dim=32"
    assert main(["plan", "classes.toml", "--quick", "--on", "v5e-8", wider]) == 0
    assert "layers.down is" in lines(capsys.readouterr().out)["weights load"][1]


def epoch_rows(run):
    from lmwright.data.rows.store import TokenStore

    return TokenStore.open(run.data.dir).epoch_rows


@pytest.mark.slow
def test_adapters_are_opened_in_peft(run, capsys, trained_run):
    pytest.importorskip("peft")
    assert main(["export", trained_run.dir, "base"]) == 0
    adapters = '{rank=4, adapters=[{name="code", rows=2}, {name="stories", steps=8}]}'
    words = [f"lora={adapters}", "train.init_from=base", "train.num_microbatches=1"]
    words += ["data.tokenizer.path=base", "data.tokenizer.vocab_size=none"]
    assert main(["train", "run.toml", "--rehearse", *words]) == 0
    out = capsys.readouterr().out
    assert "code: opens in PEFT" in out and "stories: opens in PEFT" in out


@pytest.mark.parametrize("reasoning", [False, True])
def test_several_processes_make_the_checks_of_one(trained_run, tmp_path, monkeypatch, reasoning):
    """Those of files, with the same words: also of layers that no other program has."""
    model = replace(trained_run.model, reasoning=Reasoning(every=1) if reasoning else None)
    run = replace(trained_run, model=model)
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir(), several.mkdir()
    alone = rehearsal_checks.file_checks(run, one)
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    assert rehearsal_checks.file_checks(run, several) == alone
    assert [check.holds for check in alone] == [None if reasoning else True, True]


def test_a_process_of_checks_that_dies_is_a_check(trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    monkeypatch.setattr(rehearsal_checks.sys, "executable", "/bin/false")
    (check,) = rehearsal_checks.file_checks(trained_run, tmp_path)
    assert (check.name, check.holds) == ("export", False) and "ended with 1" in check.evidence


@pytest.mark.slow
def test_a_rehearsal_on_two_hosts(run, tmp_path):
    done = typed(
        tmp_path, "launch", "run.toml", "--on", "local:2x1", "--rehearse", "go", "--name",
        f"rehearsed-{tmp_path.name}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = lines(done.stdout)
    assert said["resumes"][0] == said["export"][0] == said["writes text"][0] == "yes"
    assert load_run("run").name == "small" and not Path("run.rehearsal").exists()
