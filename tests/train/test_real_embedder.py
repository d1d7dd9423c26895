"""Vectors of real texts: solutions of problems are found by their questions, after minutes on a
CPU."""

import json

import pytest

from lmwright.evals.held_out import open_held_out
from tests.train.test_real_classifier import fields, trained

pytestmark = pytest.mark.slow
PAIRS = 4000


def write_pairs(problems, path):
    """jsonl of questions and their solutions."""
    with problems.open() as file, path.open("w") as out:
        for line, _ in zip(file, range(PAIRS), strict=False):
            row = json.loads(line)
            pair = {"anchor": row["question"], "positive": row["answer"]}
            out.write(json.dumps(pair) + "\n")


def test_solutions_are_found_by_their_question(shared_data, tmp_path):
    text = shared_data / "text"
    write_pairs(shared_data / "instruct/gsm8k_train.jsonl", tmp_path / "solutions.jsonl")
    small = {"precision": "fp32", "remat": "none"}
    names = ("wikitext2_valid.tokens.txt", "wikitext2_test.tokens.txt", "books_txt")
    encoder = fields(
        tmp_path, "encoder", recipe="pretrain-encoder",
        model={
            "kind": "eurobert", "vocab_size": 4096, "embed_dim": 128, "mlp_dim": 384,
            "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "seq_len": 256,
        },
        data={
            "dir": str(tmp_path / "text"), "pack": {"seq_len": 128},
            "sources": [{"path": str(text / name), "documents": "paragraph"} for name in names],
        },
        train={**small, "global_batch_size": 16, "steps": 400},
        optim={"learning_rate": 2e-3, "schedule": {"kind": "cosine", "warmup_steps": 40}},
        eval={"every_steps": 400},
    )  # fmt: skip
    trained(tmp_path, encoder)
    solutions = fields(
        tmp_path, "solutions", recipe="finetune-embedder",
        objective={"direction": "both"},
        data={
            "dir": str(tmp_path / "related"), "holdout_fraction": 0.1,
            "sources": [{"path": str(tmp_path / "solutions.jsonl"), "rows": "related"}],
        },
        train={**small, "global_batch_size": 32, "steps": 480,
               "init_from": str(tmp_path / "encoder")},
        optim={"learning_rate": 1e-3, "schedule": {"warmup_steps": 16}},
    )  # fmt: skip
    run = trained(tmp_path, solutions)
    opened = open_held_out(run.dir)
    (loss,) = opened.held_out.losses(opened.weights)
    lines = [json.loads(line) for line in (tmp_path / "solutions/metrics.jsonl").open()]
    before = next(line for line in lines if line["kind"] == "eval")
    print(loss.tokens, before["accuracy_at_1"], loss.accuracy, loss.mrr)
    assert before["step"] == 0
    assert loss.accuracy > before["accuracy_at_1"] + 0.15
