"""Time to the first step, and to the last, with and without `data.portions`.

    python benchmarks/early_start.py --text code.jsonl.gz --tokenizer gpt2 --tokens 10_000_000

Both prepare and train the same run on this machine: once one after the other, once together, with
training begun when the first portion is there. Copies of the text make more of it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """\
recipe = "pretrain"
name = "early"
dir = "run"
[model]
kind = "llama"
vocab_size = 50304
embed_dim = 32
mlp_dim = 64
num_layers = 1
num_heads = 2
num_kv_heads = 2
head_dim = 16
seq_len = 512
[data]
dir = "data"
sources = [{{ path = "text", name = "text", sample_tokens = {tokens} }}]
tokenizer = {{ path = "{tokenizer}" }}
pack = {{ method = "chunk" }}
normalize = {{ dedup = "none" }}
holdout_fraction = 0.001
{portions}
[train]
steps = {steps}
global_batch_size = 4
precision = "fp32"
[optim]
schedule = {{ warmup_steps = 1 }}
[eval]
max_rows = 4
[metrics]
log_every_steps = 1
trackers = []
"""


def lmwright(folder: Path, *words: str) -> subprocess.Popen:
    """A command that runs in a folder."""
    command = [sys.executable, "-m", "lmwright", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def finish(process: subprocess.Popen) -> None:
    """Waits for a command that must succeed."""
    if process.wait():
        raise SystemExit(f"{process.args} failed")


def first_step(folder: Path) -> bool:
    """True once a step is written down."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return any(json.loads(line)["kind"] == "train" for line in lines)


def measure(folder: Path, together: bool) -> tuple[float, float]:
    """Seconds until the first step is written down, and until the last one."""
    began = time.monotonic()
    preparing = lmwright(folder, "prepare", "run.toml")
    if together:
        while not (folder / "data" / "portions.json").exists():
            time.sleep(0.05)
            if preparing.poll():
                raise SystemExit("prepare failed")
    else:
        finish(preparing)
    training = lmwright(folder, "train", "run.toml")
    while not first_step(folder) and training.poll() is None:
        time.sleep(0.05)
    first = time.monotonic() - began
    finish(training)
    finish(preparing)
    return first, time.monotonic() - began


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--tokens", type=int, required=True, help="of the sample")
    parser.add_argument("--portions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    for portions in (None, given.portions):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "text").mkdir()
            for copy in range(given.copies):
                target = folder / "text" / f"{copy}-{given.text.name}"
                target.symlink_to(given.text.resolve())
            line = "" if portions is None else f"portions = {portions}"
            tokenizer = given.tokenizer.resolve()
            run = RUN.format(
                tokens=given.tokens, tokenizer=tokenizer, portions=line, steps=given.steps
            )
            (folder / "run.toml").write_text(run)
            first, last = measure(folder, portions is not None)
        how = "one store" if portions is None else f"{portions} portions"
        print(f"{how:<12} first step after {first:6.1f} s, all after {last:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
