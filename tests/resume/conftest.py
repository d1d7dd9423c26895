"""A tiny prepared store and a run over it, shared by the resume tests."""

import json
import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint, Data, Eval, Metrics, Pack, Run, Source, Tokenizer, Train
from lmwright.formats.open import load_run
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from quick_compile import FLAGS

STEPS = 12


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> Run:
    """A run whose data is prepared; give it a `dir` of its own before training."""
    from lmwright.data.prepare import prepare

    root = tmp_path_factory.mktemp("small")
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
    for name, count in (("train", 220), ("heldout", 20)):
        lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(5, 60)))})
                 for _ in range(count)]  # fmt: skip
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run = Run(
        name="small",
        dir=str(root / "run"),
        model=Llama(
            vocab_size=320, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=8, seq_len=32,
        ),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=3e-3),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(
                Source(path=str(root / "train.jsonl")),
                Source(path=str(root / "heldout.jsonl"), use="eval"),
            ),
            tokenizer=Tokenizer(vocab_size=300),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=STEPS, global_batch_size=4, num_microbatches=2, precision="fp32"),
        eval=Eval(every_steps=6),
        checkpoint=Checkpoint(save_every_steps=3, keep_last=2),
        metrics=Metrics(log_every_steps=1, trackers=()),
    )  # fmt: skip
    prepare(run.data, run.model.seq_len)
    return run


def in_dir(run: Run, folder: Path) -> Run:
    return replace(run, dir=str(folder))


def losses(run: Run) -> dict[int, float]:
    """Loss by step, each step once."""
    found = {}
    for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            assert row["step"] not in found, "a step was logged twice"
            found[row["step"]] = row["loss"]
    return found


def train_in_process(run: Run, before: str = "", devices: int = 1) -> subprocess.CompletedProcess:
    """Trains in a process of its own, after running the lines of `before`."""
    run_file = Path(run.dir).with_suffix(".toml")
    run_file.write_text(dump_toml(run))
    assert load_run(run_file, []) == run
    code = textwrap.dedent(before) + textwrap.dedent(f"""
        from lmwright.formats.open import load_run
        from lmwright.train.command import train_command
        raise SystemExit(train_command(load_run({str(run_file)!r}, [])))
    """)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
    )


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process that trains on CPU devices with the checkout under test."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count={devices}",
        "PATH": "/usr/bin:/bin",
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs `lmwright WORDS` in a folder, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "lmwright", *words],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="session")
def trained_run(small_run, tmp_path_factory) -> Run:
    """A run that has done its steps; copy its directory before changing anything."""
    import jax

    from lmwright.train.loop import train

    run = in_dir(small_run, tmp_path_factory.mktemp("trained") / "run")
    assert train(run, jax.devices()[:1]).exit_code == 0
    return run
