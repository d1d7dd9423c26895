"""From a run directory: its newest weights, its tokenizer, its facts in the card."""

import json

import jax
import numpy as np
import pytest

from lmwright.checkpoint.store import Checkpoints
from lmwright.config.load import dump_toml
from lmwright.config.run import Data, Pack, Run, Source, Tokenize, Tokenizer, Train
from lmwright.core.param import map_params
from lmwright.data.prepare import prepare
from lmwright.errors import UserError
from lmwright.evals.generate import generate_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_read import import_hf
from lmwright.formats.load import load_model
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, saved

LINES = [
    {"step": 2, "time": 5.0, "kind": "train", "loss": 3.25, "tokens_seen": 256},
    {"step": 2, "time": 6.0, "kind": "eval", "source": "short", "loss": 3.5, "ppl": 33.1},
]


def weights_at(step, model):
    rng = np.random.default_rng(step)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4"), model.spec())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two checkpoints of an untrained model whose documents begin with bos."""
    root = tmp_path_factory.mktemp("run")
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
    folder = root / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(dump_toml(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    shapes = saved(abstract_state(resolve(run, jax.devices()[:1])))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            weights = weights_at(step, run.model)
            model = state["trained"]["model"] | {"weights": weights}
            checkpoints.save(step, state | {"trained": {"model": model}}, {})
            checkpoints.wait()
    return folder


def test_a_run_directory_is_exported_with_its_facts(run_dir, tmp_path, capsys, monkeypatch):
    from lmwright.formats import reference

    monkeypatch.setattr(
        reference.importlib.util, "find_spec", lambda name: None
    )  # tested elsewhere
    export_command(run_dir, tmp_path / "out")
    model, w, _ = import_hf(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, w, weights_at(2, model))
    printed = capsys.readouterr().out
    assert "equal bit for bit" in printed and "transformers: not compared" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "# tiny", "| short | train |", "| short | 3.5 | 33.1 |", "| steps | 2 of 4 |",
        "| optim.learning_rate | 0.0123 |", "| data.tokenizer.vocab_size | 290 |",
    ):  # fmt: skip
        assert fact in card
    assert str(run_dir.parent) not in card
    loaded = load_model(tmp_path / "out")
    assert loaded.prompt_prefix == (loaded.tokenizer.bos_id,) == load_model(run_dir).prompt_prefix

    capsys.readouterr()
    found = [
        generate_command(path, ["the cat"], max_new_tokens=12, temperature=1.0, seed=4)
        for path in (run_dir, tmp_path / "out")
    ]
    assert found[0] == found[1] and found[0][0].prompt_tokens > 1
    assert capsys.readouterr().out == f"the cat{found[0][0].text}\n" * 2


def test_a_run_without_its_tokenizer(run_dir, tmp_path, monkeypatch):
    data = run_dir.parent / "data"
    data.rename(run_dir.parent / "away")
    try:
        with pytest.raises(UserError, match="tokenizer is not there"):
            export_command(run_dir, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    finally:
        (run_dir.parent / "away").rename(data)


def test_a_run_without_checkpoint(run_dir, tmp_path):
    (tmp_path / "run.toml").write_text((run_dir / "run.toml").read_text())
    with pytest.raises(UserError, match="no checkpoint"):
        load_model(tmp_path)
