"""What podsmith 0.1.0, as lmwright was called, has written is still read.

The archive holds what that version made of a text of its own with these commands:

    podsmith prepare run.toml && podsmith train run.toml        # data, run: 6 of 6 steps
    podsmith export run hf && podsmith export run model.gguf --dtype fp32
    podsmith train lora.toml && podsmith adapters export lora adapter
"""

import json
import tarfile
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run

ARCHIVE = Path(__file__).with_name("podsmith-0.1.0.tar.xz")
# What that version printed of these folders afterwards, in float32 on a CPU.
LOSS_AT_10, HELD_OUT_AT_10 = 5.666065692901611, 5.65512671324884
LORA_LOSS_AT_6 = 5.662388324737549


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(autouse=True)
def inside(archive, monkeypatch):
    monkeypatch.chdir(archive)
    return archive


def last(run, kind, field):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind][-1][field]


def test_a_seed_above_those_of_today_is_that_of_the_same_run(inside, tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    lines = [
        line for line in Path("run", "run.toml").read_text().splitlines() if "seed" not in line
    ]
    run_file.write_text("\n".join([f"seed = {2**32 + 5}", *lines]))
    assert main(["config", "show", str(run_file)]) == 2
    assert "seed must be a number below 4294967296" in capsys.readouterr().err
    (tmp_path / "env.json").write_text("{}")
    assert load_run(tmp_path).seed == 5


def test_a_run_continues(inside, capsys):
    assert main(["train", "run", "train.steps=10"]) == 0
    assert "continuing from step 6" in capsys.readouterr().out
    assert last("run", "train", "step") == 10
    assert last("run", "train", "loss") == pytest.approx(LOSS_AT_10, abs=2e-6)
    assert last("run", "eval", "loss") == pytest.approx(HELD_OUT_AT_10, abs=2e-6)


def test_adapters_continue(inside, capsys):
    assert main(["train", "lora.toml", "train.steps=6"]) == 0
    assert "continuing from step 4" in capsys.readouterr().out
    assert last("lora", "train", "loss") == pytest.approx(LORA_LOSS_AT_6, abs=2e-6)


def test_a_store_is_up_to_date(inside):
    before = {p: p.read_bytes() for p in Path("data").rglob("*") if p.is_file()}
    assert main(["data", "verify", "data"]) == 0
    assert main(["prepare", "run.toml"]) == 0
    assert {p: p.read_bytes() for p in Path("data").rglob("*") if p.is_file()} == before


def test_exported_models_are_those_of_the_run(inside):
    assert main(["verify", "hf", "model.gguf"]) == 0
    assert main(["generate", "hf", "--prompt", "the cat", "--max-new-tokens", "4"]) == 0


def test_an_exported_folder_is_known_as_ours_and_replaced(inside, capsys):
    assert main(["export", "hf", "again"]) == 0
    assert Path("hf", "convert.json").exists()
    assert main(["export", "again", "hf", "--overwrite"]) == 0


def test_an_adapter_knows_its_base(inside, capsys):
    assert Path("adapter", "podsmith.json").exists()
    assert main(["adapters", "merge", "hf", "adapter", "merged"]) == 0
    assert main(["vocab", "hf", "padded", "--multiple", "128"]) == 0
    capsys.readouterr()
    assert main(["adapters", "merge", "padded", "adapter", "wrong"]) == 2
    assert "was trained on hf, and the weights of padded differ" in capsys.readouterr().err
    assert not Path("wrong").exists()
