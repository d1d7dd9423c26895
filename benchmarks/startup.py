"""Seconds from the command to the first trained step: cold, and with a warm compilation cache.

    python benchmarks/startup.py [--rounds 3] [--shape tiny]

    command --imports, data, state--> compile --> first step done
    cold:  an empty compilation cache        warm:  the cache that the cold start has filled

Each start is a process of its own on a run directory of its own; the data is prepared once.
Times are read off metrics.jsonl, which `lmwright train` writes with the wall clock.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """\
name = "startup"
dir = "{root}/run"

[model]
kind = "llama"
vocab_size = 2048
embed_dim = {embed_dim}
mlp_dim = {mlp_dim}
num_layers = {num_layers}
num_heads = 8
num_kv_heads = 4
head_dim = {head_dim}
seq_len = 256

[objective]
kind = "clm"

[optim]
kind = "adamw"
learning_rate = 1e-3

[data]
dir = "{root}/data"

[[data.sources]]
path = "{root}/text.jsonl"

[data.tokenizer]
vocab_size = 2048

[train]
steps = 2
global_batch_size = 8

[metrics]
log_every_steps = 1
trackers = []
"""

SHAPES = {
    "tiny": {"embed_dim": 256, "mlp_dim": 1024, "num_layers": 4, "head_dim": 32},
    "deep": {"embed_dim": 512, "mlp_dim": 1536, "num_layers": 24, "head_dim": 64},
}
PHASES = ("until compiling", "compile", "first step", "command to first step")


def main() -> None:
    """Prepares once, then starts `--rounds` times cold and as often warm, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_inputs(root, SHAPES[args.shape])
        lmwright(root, "prepare", str(root / "run.toml"))
        found: dict[str, list[list[float]]] = {"cold": [], "warm": []}
        for i in range(args.rounds):
            for kind in found:
                # The warm start finds the cache that the cold one before it has filled.
                found[kind].append(start(root, f"{kind}{i}", cache=root / f"cache{i}"))
        helps = [seconds_of_help(root) for _ in range(args.rounds)]
    report(args.shape, found, helps)


def write_inputs(root: Path, shape: dict[str, int]) -> None:
    """A run file and enough made-up text for its two steps."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(4000)]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=400))}) for _ in range(300)]
    (root / "text.jsonl").write_text("\n".join(lines) + "\n")
    (root / "run.toml").write_text(RUN.format(root=root, **shape))


def lmwright(root: Path, *args: str, cache: Path | None = None) -> None:
    """Runs the command line; its output is shown only if it fails."""
    env = dict(os.environ)
    if cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    command = [sys.executable, "-m", "lmwright.cli.main", *args]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def start(root: Path, name: str, cache: Path) -> list[float]:
    """Seconds of each phase of one `lmwright train`."""
    began = time.time()
    run_dir = root / name
    lmwright(root, "train", str(root / "run.toml"), f"dir={run_dir}", cache=cache)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    compiled = next(line for line in lines if line["kind"] == "compile")
    first = next(line for line in lines if line["kind"] == "train")
    return [
        compiled["time"] - compiled["seconds"] - began,
        compiled["seconds"],
        first["time"] - compiled["time"],
        first["time"] - began,
    ]


def seconds_of_help(root: Path) -> float:
    """Seconds of `lmwright --help`."""
    began = time.perf_counter()
    lmwright(root, "--help")
    return time.perf_counter() - began


def report(shape: str, found: dict[str, list[list[float]]], helps: list[float]) -> None:
    """Medians over the rounds, and how much the cache saves."""
    rows = {kind: [statistics.median(each) for each in zip(*times, strict=True)]
            for kind, times in found.items()}  # fmt: skip
    print(f"shape {shape}, {os.cpu_count()} cores, median of {len(helps)} rounds, seconds")
    print(f"{'':24}{'cold':>9}{'warm':>9}{'warm/cold':>11}")
    for i, phase in enumerate(PHASES):
        cold, warm = rows["cold"][i], rows["warm"][i]
        print(f"{phase:24}{cold:9.2f}{warm:9.2f}{warm / cold:11.2f}")
    print(f"{'lmwright --help':24}{statistics.median(helps):9.2f}")


if __name__ == "__main__":
    main()
