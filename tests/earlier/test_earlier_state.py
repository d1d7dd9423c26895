"""Checkpoints from before a state listed its trainees by name.

The archive holds two runs of lmwright at commit 629d66a on the data of the other archive, on one
CPU device; `ema.toml` trains a model with a moving average, `three.toml` three adapters, of
which one has ended:

    lmwright train ema.toml && lmwright train three.toml        # 6 of 6 steps, 4 of 4 steps
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from lmwright.cli.main import main
from tests.resume.conftest import one_device  # noqa: F401

HERE = Path(__file__).parent
# What that commit logged when the runs continued, in float32 on a CPU.
EMA_AT_10 = {"loss": 5.666065692901611, "grad_norm": 0.9066586494445801}
EMA_HELD_OUT_AT_10 = 5.686346861993382
THREE_AT_6 = {"loss/b": 5.66188383102417, "loss/c": 5.671515464782715}
THREE_HELD_OUT_AT_6 = {"b/words": 5.671314222843886, "c/words": 5.6709560077783845}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    for path in HERE.glob("*.tar.xz"):
        with tarfile.open(path) as tar:
            tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(autouse=True)
def inside(archive, one_device, monkeypatch):  # noqa: F811
    """In their folder, on one device as they were."""
    monkeypatch.chdir(archive)


def logged(run, kind):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_model_with_an_average_is_read_and_continues(capsys):
    assert main(["eval", "ema"]) == 0
    assert "5.7006" in capsys.readouterr().out
    assert main(["train", "ema", "train.steps=10"]) == 0
    assert "continuing from step 6" in capsys.readouterr().out
    last = logged("ema", "train")[-1]
    assert last["step"] == 10
    for name, value in EMA_AT_10.items():
        assert last[name] == pytest.approx(value, abs=2e-6), name
    assert logged("ema", "eval")[-1]["loss"] == pytest.approx(EMA_HELD_OUT_AT_10, abs=2e-6)
    assert main(["train", "ema", "train.steps=11"]) == 0  # from a checkpoint of today


@pytest.mark.slow
def test_several_adapters_are_read_and_continue(tmp_path, capsys):
    assert main(["adapters", "export", "three", str(tmp_path / "a"), "--adapter", "a"]) == 0
    assert main(["train", "three.toml", "train.steps=6"]) == 0
    assert "continuing from step 4" in capsys.readouterr().out
    last = logged("three", "train")[-1]
    assert last["step"] == 6 and "loss/a" not in last  # which had ended
    for name, value in THREE_AT_6.items():
        assert last[name] == pytest.approx(value, abs=2e-6), name
    found = {line["source"]: line["loss"] for line in logged("three", "eval")[-2:]}
    assert found == pytest.approx(THREE_HELD_OUT_AT_6, abs=2e-6)


def test_other_frozen_weights_are_refused(capsys):
    shutil.copytree("three", "moved")
    assert main(["train", "moved", "train.init_from=ema", "train.steps=8"]) == 2
    assert "ema is not the base that the adapters" in capsys.readouterr().err
