"""Two processes compare the texts of a whole batch, and rank held-out ones, as one process does."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmwright.config.run import (
    Data,
    Eval,
    Mesh,
    Metrics,
    Pack,
    Run,
    Source,
    Tokenizer,
    Train,
)
from lmwright.data.prepare import prepare
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.embed import Embed
from lmwright.optim import KINDS
from lmwright.train.session import train
from tests.resume.test_hosts import start_two


def figures(run):
    """Losses, and reciprocal ranks of held-out texts."""
    lines = map(json.loads, (Path(run.dir) / "metrics.jsonl").open())
    return [(line["loss"], line.get("mrr_at_10", 0.0)) for line in lines if "loss" in line]


@pytest.mark.slow
def test_two_processes_have_no_fewer_negatives(tmp_path):
    pairs = [(f"where is {i}?", f"{i} is" + " near here" * (i % 5)) for i in range(300)]
    lines = [json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    run = Run(
        name="pairs",
        dir=str(tmp_path / "one"),
        model=EuroBert(
            vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=4, seq_len=96,
        ),
        objective=Embed(direction="both"),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(tmp_path / "data"),
            workers=1,
            holdout_fraction=0.2,
            sources=(Source(path=str(tmp_path / "pairs.jsonl"), rows="related"),),
            tokenizer=Tokenizer(vocab_size=290),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=4, global_batch_size=16, num_microbatches=2, precision="fp32"),
        metrics=Metrics(log_every_steps=1, trackers=()),
        mesh=Mesh(fsdp=8),
        eval=Eval(first="start"),
    )  # fmt: skip
    prepare(run.data, 96)
    train(run)
    two = replace(run, dir=str(tmp_path / "two"))
    started = start_two(two)
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert len(figures(run)) == 6
    np.testing.assert_allclose(figures(two), figures(run), rtol=1e-4)
