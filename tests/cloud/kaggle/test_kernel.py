"""The script that runs at Kaggle: what it refuses, and whole sessions on this machine's CPUs."""

import json
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lmwright.cloud.jobs import follow
from lmwright.cloud.kaggle import kernel, launch
from lmwright.cloud.spec import Limits, read_state
from lmwright.config.run import Tokenizer
from lmwright.train.session import train
from tests.cloud.kaggle.host_packages import use_packages_of_this_python
from tests.cloud.kaggle.service import run_script

STEPS = 40


def test_inputs_are_found_wherever_they_are_mounted(tmp_path):
    (tmp_path / "datasets" / "acme" / "cats").mkdir(parents=True)
    (tmp_path / "datasets" / "acme" / "cats" / "a.lmw").touch()
    found = kernel.find_inputs([str(tmp_path)], ["a.lmw"])
    assert found == {"a.lmw": str(tmp_path / "datasets" / "acme" / "cats" / "a.lmw")}
    with pytest.raises(kernel.Refusal, match=r"b.lmw is not among the inputs"):
        kernel.find_inputs([str(tmp_path)], ["b.lmw"])


def test_no_internet_is_refused():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(kernel.Refusal, match="turn the internet on"):
            kernel.check_hosts([f"127.0.0.1:{port}"])


def test_secrets(tmp_path, monkeypatch):
    with pytest.raises(kernel.Refusal, match=r"the secret WANDB_API_KEY is not given"):
        kernel.read_secrets(["WANDB_API_KEY"], tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", '{"type": "service_account"}')
    values = kernel.read_secrets(["GOOGLE_APPLICATION_CREDENTIALS"], tmp_path)
    path = Path(values["GOOGLE_APPLICATION_CREDENTIALS"])
    assert path.read_text().startswith("{") and path.stat().st_mode & 0o077 == 0


def test_secrets_of_kaggle_and_colab(monkeypatch):
    kaggle = SimpleNamespace(
        UserSecretsClient=lambda: SimpleNamespace(get_secret={"HF_TOKEN": "k"}.__getitem__)
    )
    monkeypatch.setitem(sys.modules, "kaggle_secrets", kaggle)
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    colab = SimpleNamespace(get={"WANDB_API_KEY": "c"}.__getitem__)
    monkeypatch.setitem(sys.modules, "google.colab.userdata", colab)
    assert kernel.secret("HF_TOKEN") == "k"
    assert kernel.secret("WANDB_API_KEY") == "c"
    assert kernel.secret("OTHER") == ""


def test_another_python_is_refused(tmp_path):
    with pytest.raises(kernel.Refusal, match=r"Python 3.99 is not here"):
        kernel.find_python("3.99", tmp_path, tmp_path)


@pytest.mark.slow
def test_a_machine_without_tpu_is_refused():
    told = {"platforms": "tpu,cpu", "devices": 8, "machine": "kaggle", "accelerator": "TpuV5E8"}
    environment = {"JAX_PLATFORMS": "cpu"}
    with pytest.raises(kernel.Refusal, match=r"has no TPU \(cpu\).*choose TpuV5E8"):
        kernel.check_devices(Path(sys.executable), environment, told)


@pytest.mark.slow
def test_two_sessions_equal_one_run(fake, run, tmp_path, monkeypatch):
    use_packages_of_this_python(monkeypatch, tmp_path / "wheels")
    run = replace(run, train=replace(run.train, steps=STEPS))
    folders = iter([tmp_path / "one", tmp_path / "two"])
    stops = iter(["step 10/", ""])
    fake.play = lambda fake, session: run_script(fake, session, next(folders), next(stops))
    here = replace(run, dir=str(tmp_path / "here"))
    train(here)
    data = replace(run.data, tokenizer=Tokenizer(path=str(tmp_path / "tokenizer.json")))
    there = replace(run, dir=str(tmp_path / "there"), data=data)
    spec = launch.launch(there, "cats", Limits())
    Path(run.data.sources[0].path).unlink()  # as there
    shutil.rmtree(run.data.dir)
    assert follow(spec) == 0, (spec.folder / "logs" / "host-0.log").read_text()
    state = read_state(spec)
    assert (state["status"], state["attempt"], state["step"]) == ("done", 2, STEPS)
    assert losses(there) == losses(here)
    environment = json.loads((Path(there.dir) / "env.json").read_text())
    assert "PYTHONPATH" not in environment["variables"]


def losses(run):
    lines = map(json.loads, (Path(run.dir) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
