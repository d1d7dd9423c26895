"""Vectors of real paragraphs: a half of one is found by the other, after minutes on a CPU."""

import json
import re

import pytest

from lmwright.evals.held_out import open_held_out
from tests.train.test_real_classifier import WORDS, fields, trained

pytestmark = pytest.mark.slow


def write_halves(books, path):
    """jsonl of the two halves of each paragraph of at least twice WORDS words."""
    with path.open("w") as file:
        for book in sorted(books.glob("*.txt")):
            for paragraph in re.split(r"\n\s*\n", book.read_text("utf-8")):
                words = paragraph.split()[: 4 * WORDS]
                if len(words) >= 2 * WORDS and not paragraph.startswith("#"):
                    half = len(words) // 2
                    pair = {"anchor": " ".join(words[:half]), "positive": " ".join(words[half:])}
                    file.write(json.dumps(pair) + "\n")


def test_halves_of_paragraphs_find_each_other(shared_data, tmp_path):
    books = shared_data / "text/books_txt"
    write_halves(books, tmp_path / "halves.jsonl")
    small = {"precision": "fp32", "global_batch_size": 16}
    encoder = fields(
        tmp_path, "encoder", recipe="pretrain-encoder",
        model={
            "kind": "eurobert", "vocab_size": 4096, "embed_dim": 128, "mlp_dim": 384,
            "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "seq_len": 256,
        },
        data={
            "dir": str(tmp_path / "text"), "pack": {"seq_len": 128},
            "sources": [{"path": str(books), "documents": "paragraph"}],
        },
        train={**small, "steps": 400, "remat": "none"},
        optim={"learning_rate": 2e-3, "schedule": {"kind": "cosine", "warmup_steps": 40}},
        eval={"every_steps": 400},
    )  # fmt: skip
    trained(tmp_path, encoder)
    halves = fields(
        tmp_path, "halves", recipe="finetune-embedder",
        objective={"direction": "both", "matryoshka_dims": [128, 32]},
        data={
            "dir": str(tmp_path / "related"), "holdout_fraction": 0.1,
            "sources": [{"path": str(tmp_path / "halves.jsonl"), "rows": "related"}],
        },
        train={**small, "epochs": 10.0, "init_from": str(tmp_path / "encoder")},
        optim={"learning_rate": 1e-3, "schedule": {"warmup_steps": 20}},
    )  # fmt: skip
    run = trained(tmp_path, halves)
    opened = open_held_out(run.dir)
    (loss,) = opened.held_out.losses(opened.weights)
    lines = [json.loads(line) for line in (tmp_path / "halves/metrics.jsonl").open()]
    before = next(line for line in lines if line["kind"] == "eval")
    print(loss.tokens, before["accuracy_at_1"], loss.accuracy, loss.mrr)
    assert before["step"] == 0
    assert loss.accuracy > 2 * before["accuracy_at_1"] + 0.1
