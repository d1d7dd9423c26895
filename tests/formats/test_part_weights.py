"""`train.init_parts`: some weights from another model, rows of its vocabulary by token."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
import transformers

from lmwright.cli.main import main
from lmwright.core.param import walk
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.formats.open import load_run, open_place
from lmwright.formats.part_weights import matched
from lmwright.formats.weights import host_weights
from lmwright.program.plan import resolve
from lmwright.program.stores import open_stores
from lmwright.program.trainee import Frozen
from lmwright.train.start import first_state, starting_note
from tests.saved_run import save_run, tiny_run

SIZES = dict(embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with a run of random weights, and the data of another one with other tokens."""
    root = tmp_path_factory.mktemp("parts")
    for name in ("a", "b"):
        (root / name).mkdir()
    save_run(tiny_run(root / "a"), steps=(1,))
    shutil.copytree(root / "a" / "data" / "tokenizer", root / "a" / "run" / "tokenizer")
    text = "".join(json.dumps({"text": f"a dog {i} lay by the cat"}) + "\n" for i in range(60))
    (root / "b" / "text.jsonl").write_text(text)
    run = {
        "name": "b",
        "dir": str(root / "b" / "run"),
        "model": {"kind": "llama", "vocab_size": 300, "seq_len": 48, **SIZES},
        "objective": {"kind": "clm"},
        "optim": {"kind": "adamw", "learning_rate": 0.001},
        "data": {
            "dir": str(root / "b" / "data"),
            "workers": 1,
            "sources": [{"path": str(root / "b" / "text.jsonl")}],
            "tokenizer": {"vocab_size": 280, "special_tokens": ["<end>"]},
        },
        "train": {
            "steps": 2, "global_batch_size": 2, "precision": "fp32",
            "init_from": str(root / "a" / "run"), "init_parts": ["embed", "layers.mlp_norm"],
        },
    }  # fmt: skip
    (root / "run.toml").write_text(tomli_w.dumps(run))
    assert main(["prepare", str(root / "run.toml")]) == 0
    return root


def first(run):
    """The first weights of a run by path, and the note on them."""
    plan = resolve(run, jax.devices()[:2])
    state = first_state(plan, open_stores(plan)["model"], Frozen({}))
    return dict(walk(jax.tree.map(np.asarray, state["trained"]["model"]["weights"])))


def test_parts_are_taken_rows_by_token_and_the_rest_is_fresh(places):
    run = load_run(places / "run.toml")
    Path(run.dir).mkdir()
    mine, theirs = first(run), dict(walk(host_weights(open_place(run.train.init_from))))
    plain = first(replace(run, train=replace(run.train, init_from=None, init_parts=())))
    np.testing.assert_array_equal(mine["layers.mlp_norm"], theirs["layers.mlp_norm"])
    ours, other = (
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(places / name / "tokenizer.json"))
        for name in ("b/data/tokenizer", "a/data/tokenizer")
    )
    known, found = other.get_vocab(), 0
    for token, i in ours.get_vocab().items():
        j = other.get_vocab()["<|endoftext|>"] if token == "<end>" else known.get(token)
        if j is None:
            np.testing.assert_array_equal(mine["embed"][i], plain["embed"][i])
        else:
            found += 1
            np.testing.assert_array_equal(mine["embed"][i], theirs["embed"][j])
    assert 256 < found < 280
    for name in mine.keys() - {"embed", "layers.mlp_norm"}:
        np.testing.assert_array_equal(mine[name], plain[name])
    note = starting_note(Path(run.dir))
    assert f"{found:,} of 300 rows of the vocabulary by token" in note
    assert "layers.q" in note and "embed" not in note.partition("fresh")[2]


@pytest.mark.parametrize(
    "words, told",
    [
        (["train.init_parts=[\"embd\"]"], "has no 'embd'; did you mean 'embed'?"),
        (["model.embed_dim=32"], r"embed is (320, 16) in"),
        (['train.init_parts=["layers"]', "model.num_layers=3"], "leave 'layers' out"),
        (['train.init_parts=["layers"]', "model.qk_norm=head"], "which this run's model has"),
        (["lora.rank=4"], "has no effect with [lora]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(places, words, told, capsys):
    new = [f"dir={places}/new", "train.global_batch_size=8"]
    assert main(["train", str(places / "run.toml"), *new, *words]) == 2
    assert told in capsys.readouterr().err
    assert not Path(places, "new").exists()


def test_parts_of_nothing_are_refused(places, tmp_path):
    table = tomllib.loads((places / "run.toml").read_text())
    del table["train"]["init_from"]
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(UserError, match=r"init_parts: has no effect without train\.init_from"):
        load_run(tmp_path / "run.toml")


def test_tokens_of_sentencepiece_and_of_bytes_are_one(shared_data):
    folder = shared_data / "tokenizers"
    gpt2, llama = (import_tokenizer(str(folder / name)) for name in ("gpt2", "llama2"))
    rows = matched(gpt2, llama, 50_257)
    there = llama.backend.get_vocab()
    ours = gpt2.backend.get_vocab()
    assert rows[ours["\u0120the"]] == there["\u2581the"] and rows[ours["e"]] == there["e"]
    assert rows[gpt2.eos_id] == llama.eos_id
    assert (rows >= 0).sum() > 10_000
