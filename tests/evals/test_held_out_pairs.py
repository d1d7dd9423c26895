"""Held-out answers: `eval` of a run whose objective compares an adapter with its base gives what
training measured, rewards included."""

import json

import pytest

from lmwright.cli.main import main
from tests.resume.conftest import one_device  # noqa: F401

ROWS = {
    "dpo": ("preference", ({"chosen": "yes it is", "rejected": "no"},)),
    "kto": (
        "rated",
        ({"completion": "yes it is", "label": True}, {"completion": "no", "label": False}),
    ),
}


def make_run(root, kind):
    rows, answers = ROWS[kind]
    asked = [{"prompt": f"is {i} a number?"} | answer for i in range(12) for answer in answers]
    text = "".join(json.dumps(row) + "\n" for row in asked)
    (root / "a.jsonl").write_text(text)
    (root / "b.jsonl").write_text(text.replace("number", "letter"))
    source = f'rows = "{rows}", path = "{root}'
    (root / "run.toml").write_text(f"""
name = "small"
dir = "{root}/run"
objective = {{kind = "{kind}"}}
optim = {{kind = "adamw", learning_rate = 0.2}}
lora = {{rank = 2, base = "fp32"}}
train = {{steps = 1, global_batch_size = 8, precision = "fp32"}}
metrics = {{trackers = []}}

[model]
kind = "llama"
vocab_size = 320
embed_dim = 16
mlp_dim = 24
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
seq_len = 256

[data]
dir = "{root}/data"
workers = 1
tokenizer = {{vocab_size = 300}}
chat = {{template = "chatml"}}
pack = {{method = "best-fit"}}
sources = [{{{source}/a.jsonl"}}, {{{source}/b.jsonl", use = "eval"}}]
""")
    return str(root / "run.toml")


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_device")
def test_eval_compares_with_the_base_as_training_does(kind, tmp_path, capsys):
    path = make_run(tmp_path, kind)
    assert main(["train", path]) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    [trained] = [row for row in rows if row["kind"] == "eval"]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"{trained['loss']:.4f}" in printed
    names = ("reward_accuracy", "reward_margin")
    for name in names if kind == "dpo" else ("reward_chosen", "reward_rejected"):
        assert trained[name] != 0
        assert f"{name.replace('_', ' ')} {trained[name]:.4f}" in printed
