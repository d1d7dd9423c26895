"""Data in the directory of their own run, whose tokenizer they would replace."""

import pytest

from lmwright.cli.main import main

RUN = """
recipe = "pretrain"
name = "mine"
dir = "runs/mine"
model = {preset = "llama-500k"}
data = {dir = "data", sources = [{path = "text.txt"}], tokenizer.vocab_size = 300}
train = {steps = 2, global_batch_size = 1}
"""


@pytest.mark.parametrize("same", ["data.dir=runs/mine", "data.dir=runs/../runs/mine/"])
def test_a_new_run_has_its_data_elsewhere(same, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("words of a text\n" * 400)
    told = "is the run's own directory (dir); choose another folder, such as data/mine"
    assert main(["prepare", "run.toml", same]) == 2
    assert told in capsys.readouterr().err
    assert main(["train", "run.toml", same]) == 2  # which prepares, too
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["prepare", "run.toml"]) == 0
    capsys.readouterr()
    assert main(["train", "run.toml", "dir=data"]) == 2
    assert "data is the run's own directory" in capsys.readouterr().err
    assert not (tmp_path / "data" / "run.toml").exists()
    assert main(["data", "verify", "data"]) == 0
