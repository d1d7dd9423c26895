"""The run files of examples/ for long rows, by a user's own commands, with tiny models."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import map_params
from lmwright.data.manifest import read_manifest
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_write import write_hf
from lmwright.formats.open import load_run
from lmwright.formats.weights import load_run_weights
from lmwright.models.gemma import Gemma
from lmwright.models.llama import Llama
from tests.data.chat_problem import chat_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def command(*words):
    assert main([str(word) for word in words]) == 0, words


def command_alone(*words):
    """A command in a process of its own, with one device."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "lmwright", *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (words, done.stderr[-3000:])


def tiny_folder(model, out, tokenizer):
    """A model with random weights as a Hugging Face folder."""
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.normal(0, 0.05, p.shape).astype("f4"), model.spec())
    save_tokenizer(tokenizer, Path("tokenizer"))
    write_hf(model, HfTensors(model, w), lambda: w, Path("tokenizer"), out, dtype="fp32")


def words_of(count, rng):
    return " ".join("".join(rng.choices("abcdefgh", k=3)) for _ in range(count))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_chain_of_runs_extends_a_context(folder, capsys):
    """extend-32k.toml and extend-128k.toml as they are, but for sizes divided by 256."""
    tokenizer = chat_tokenizer()
    model = Llama(
        vocab_size=tokenizer.vocab_size, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, seq_len=32, head="tied",
    )  # fmt: skip
    tiny_folder(model, "smollm2-1.7b", tokenizer)
    rng = random.Random(1)
    Path("texts").mkdir()
    with open("texts/a.jsonl", "w") as out:
        for i in range(80):
            out.write(json.dumps({"text": words_of(8 if i % 2 else 180, rng)}) + "\n")
    small = [
        "train.steps=2", "train.global_batch_size=2", "train.precision=fp32", "data.workers=1",
        "metrics.trackers=[]", "data.holdout_fraction=0.1", "optim.schedule.warmup_steps=1",
    ]  # fmt: skip
    for name, seq_len, least in (("extend-32k", 128, 64), ("extend-128k", 512, 256)):
        said = load_run_text(EXAMPLES / f"{name}.toml", least)
        Path(f"{name}.toml").write_text(said)
        sizes = [f"model.seq_len={seq_len}", "model.rope_scaling.original_seq_len=32"]
        if name == "extend-128k":
            sizes.append("train.mlp_chunk_tokens=128")
        command("prepare", f"{name}.toml", *small, *sizes)
        counts = read_manifest(Path("data", name, "tokenize")).counts["sources"]["train"]
        long = counts["long"]
        assert long["docs"] + long["other_length"] == counts["any"]["docs"] and long["docs"] > 9
        assert long["other_length"] > 9
        assert "documents have other lengths" in capsys.readouterr().out
        command_alone("train", f"{name}.toml", *small, *sizes)
        run = load_run(Path("runs", name, "run.toml"))
        assert run.model.rope_scaling.kind == "yarn" and run.model.seq_len == seq_len
    assert run.model.rope_scaling.factor == 16.0
    # the second run went on from the first: two steps at 1e-5 and less moved weights that little
    (_, first), (_, second) = (load_run_weights(f"runs/{n}") for n in ("extend-32k", "extend-128k"))
    moved = [
        np.abs(np.asarray(a - b)).max()
        for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)
    ]
    assert 0 < max(moved) < 2.5e-5
    store = TokenStore.open("data/extend-128k")
    assert store.seq_len == 512 and store.sources == ("any", "long")
    command("eval", "runs/extend-128k", "--by-position")
    command("eval", "runs/extend-128k", "--needle", "--lengths", "256,512", "--tries", 1)
    command("report", "runs/extend-128k")
    assert "Needles found" in Path("runs/extend-128k/report.html").read_text()


@pytest.mark.slow
def test_from_instructions_of_32k_to_an_adapter(folder):
    """gemma2-9b-32k-lora.toml, rows of 32,768 tokens, with a tiny model of the same layers."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    tokenizer = chat_tokenizer()
    model = Gemma(
        vocab_size=tokenizer.vocab_size, embed_dim=32, mlp_dim=128, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=16, query_dim=16, seq_len=8192, window=4096,
        attention_soft_cap=50.0, logits_soft_cap=30.0,
    )  # fmt: skip
    tiny_folder(model, "gemma-2-9b-it", tokenizer)
    rng = random.Random(2)
    with open("instructions.jsonl", "w") as out:
        for _ in range(6):
            turns = [
                {"role": "user", "content": words_of(7000, rng)},
                {"role": "assistant", "content": words_of(20, rng)},
            ]
            out.write(json.dumps({"messages": turns}) + "\n")
    shutil.copy(EXAMPLES / "gemma2-9b-32k-lora.toml", "run.toml")
    tiny = [
        *(f"model.{name}={getattr(model, name)}" for name in (
            "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "query_dim")),
        "mesh.fsdp=1", "train.steps=2", "train.global_batch_size=1", "data.chat.template=gemma",
        "eval.max_rows=1", "metrics.trackers=[]", "data.workers=1", "train.precision=fp32",
    ]  # fmt: skip
    command_alone("prepare", "run.toml", *tiny)
    store = TokenStore.open("long-data")
    assert store.seq_len == 32_768 and store.epoch_rows >= 4
    assert store.batch(0, 1)["loss_weight"].sum() < 200  # of the answer alone
    command_alone("train", "run.toml", *tiny)
    command_alone("adapters", "export", "runs/gemma2-9b-32k-lora", "out")
    base = transformers.AutoModelForCausalLM.from_pretrained("gemma-2-9b-it")
    adapted = peft.PeftModel.from_pretrained(base, "out")
    moved = [p.abs().max().item() for name, p in adapted.named_parameters() if "lora_B" in name]
    assert len(moved) >= 8 and min(moved) > 0


def load_run_text(path, least):
    """A run file of the examples, whose long documents have at least that many tokens."""
    lines = path.read_text().splitlines()
    return "\n".join(f"min_tokens = {least}" if "min_tokens" in line else line for line in lines)
