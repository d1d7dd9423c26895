"""A run with the kernels of a GPU, which XLA computes on this CPU."""

import json

from lmwright.cli.main import main
from lmwright.kernels import gpu_attention, select
from tests.train.texts import write_run, write_texts

MODEL = """
kind = "llama"
vocab_size = 320
embed_dim = 32
mlp_dim = 48
num_layers = 1
num_heads = 4
num_kv_heads = 2
head_dim = 8
seq_len = 64
"""


def test_the_choice_of_attention_is_logged_once(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "text.jsonl")
    path = write_run(tmp_path, MODEL)
    assert main(["prepare", path]) == 0
    monkeypatch.setattr(select, "kernels_for", lambda *device: "gpu")
    monkeypatch.setattr(gpu_attention, "_taken", {})  # not by tests before this one
    capsys.readouterr()
    assert main(["train", path]) == 0
    told = "attention is computed by XLA, some queries at a time"
    assert "".join(capsys.readouterr()).count(told) == 1
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (event,) = [line for line in lines if line["kind"] == "compile"]
    assert event["attention"] == "XLA, some queries at a time"
