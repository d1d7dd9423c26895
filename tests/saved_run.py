"""Run directories as training leaves them, without training."""

import json
from pathlib import Path

import jax
import numpy as np

from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.config.run import Data, Pack, Run, Source, Tokenize, Tokenizer, Train
from lmwright.core.param import map_params
from lmwright.data.prepare import prepare
from lmwright.formats.weights import load_frozen
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, saved

LINES = [
    {"step": 1, "time": 4.0, "kind": "eval", "source": "short", "loss": 3.75, "ppl": 42.5},
    {"step": 2, "time": 5.0, "kind": "train", "loss": 3.25, "tokens_seen": 256},
    {"step": 2, "time": 6.0, "kind": "eval", "source": "short", "loss": 3.5, "ppl": 33.1},
]


def weights_at(step, spec, std=1.0):
    """Random weights that differ from step to step."""
    rng = np.random.default_rng(step)
    return map_params(lambda p: (std * rng.standard_normal(p.shape)).astype("f4"), spec)


def tiny_run(root: Path) -> Run:
    """A run whose data is prepared, and whose documents begin with bos."""
    text = "".join(json.dumps({"text": f"the cat {i} sat on the mat"}) + "\n" for i in range(60))
    (root / "text.jsonl").write_text(text)
    run = Run(
        name="tiny",
        dir=str(root / "run"),
        model=Llama(
            vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=4, seq_len=48,
        ),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=0.0123),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(Source(path=str(root / "text.jsonl"), name="short"),),
            tokenizer=Tokenizer(vocab_size=290),
            tokenize=Tokenize(prepend="bos"),
            pack=Pack(seq_len=32),
        ),
        train=Train(steps=4, global_batch_size=2),
    )  # fmt: skip
    prepare(run.data, 32)
    return run


def save_run(run: Run, steps=(1, 2), std=1.0) -> Path:
    """Writes the run's directory with a checkpoint at each step, of `weights_at` that step; the
    rest is as AdamW begins, and an average `weights_at` step 0. Nothing is compiled for it."""
    assert run.optim.kind == "adamw", "whose state begins as zeros"
    folder = Path(run.dir)
    folder.mkdir()
    (folder / "run.toml").write_text(dump_toml(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    plan = resolve(run, jax.devices()[:1])
    frozen = load_frozen(plan)
    meta = {"frozen": {"path": frozen.path, "hash": frozen.hash}}
    shapes = saved(abstract_state(plan))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for trainee in plan.training.trainees:
        part = state["trained"][trainee.name]
        part |= {"ema": weights_at(0, trainee.spec, std)} if "ema" in part else {}
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            trained = {
                trainee.name: state["trained"][trainee.name]
                | {"weights": weights_at(step, trainee.spec, std)}
                for trainee in plan.training.trainees
            }
            checkpoints.save(step, state | {"trained": trained}, meta)
            checkpoints.wait()
    return folder
