"""A run as a user has it: text and run.toml in a folder, prepared and trained by commands."""

import json
import random

from lmwright.cli.main import main

RUN = """\
recipe = "pretrain"
name = "tiny"
dir = "run"
[model]
kind = "llama"
vocab_size = 300
embed_dim = 16
mlp_dim = 24
num_layers = 2
num_heads = 2
num_kv_heads = 1
seq_len = 32
head_dim = 8
[data]
dir = "data"
workers = 1
sources = [{ path = "PATH", name = "words" }]
tokenizer = { vocab_size = 300 }
holdout_fraction = 0.1
[train]
steps = 2
precision = "fp32"
global_batch_size = 8
[optim]
schedule = { warmup_steps = 1 }
[metrics]
trackers = []
"""


def texts(count, seed=3):
    """Documents of words that repeat, so that a tokenizer can be trained on them."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(count)]


def write_run(folder, path="words.jsonl", count=60):
    """run.toml and words.jsonl in a folder."""
    (folder / "run.toml").write_text(RUN.replace("PATH", path))
    lines = (json.dumps({"text": t}) + "\n" for t in texts(count))
    (folder / "words.jsonl").write_text("".join(lines))


def command(capsys, *words):
    """Exit code and what was printed, of one command."""
    capsys.readouterr()
    code = main(list(words))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err
