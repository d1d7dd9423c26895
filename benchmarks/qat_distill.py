"""Perplexity of a real model as it is, rounded to 4 bits, and tuned with adapters inside the
rounding, by the text alone or by the model itself as a teacher.

    python benchmarks/qat_distill.py MODEL TRAIN.txt HELD_OUT.txt WORK [--steps 12] [--tokens 4096]

MODEL is a folder of Hugging Face or a run. Each difference from the model as it is comes with twice
its standard error over pieces of the held-out text. One seed.
"""

import argparse
from pathlib import Path

import numpy as np
from qat_quality import by_rule

from lmwright.cli.main import main as lmwright
from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.evals.text import encode_file, evaluate_text
from lmwright.formats.load import load_model

CONTEXT = 256
GRID = "q4_0"
OBJECTIVES = {"text": '{kind = "clm"}', "teacher": '{kind = "distill", alpha = 1.0}'}
RUN = """
name = "{name}"
dir = "{work}/{name}"
qat = {{weights = "q4_0"}}
lora = {{rank = 16, base = "fp32"}}
objective = {objective}
[data]
dir = "{work}/data"
workers = 1
sources = [{{path = "{text}"}}]
pack = {{seq_len = 128}}
[train]
steps = {steps}
global_batch_size = 4
precision = "fp32"
init_from = "{model}"
[optim]
kind = "adamw"
learning_rate = 5e-4
schedule = {{kind = "linear", warmup_steps = 2}}
[metrics]
log_every_steps = 1
trackers = []
[checkpoint]
save_every_steps = 10_000
"""


def tuned(name: str, said: argparse.Namespace) -> Path:
    """Run directory of a run that is trained if it is not yet."""
    path = said.work / f"{name}.toml"
    path.write_text(
        RUN.format(
            name=name, work=said.work, objective=OBJECTIVES[name], text=said.train,
            steps=said.steps, model=said.model,
        )
    )  # fmt: skip
    if not (said.work / "data").exists() and lmwright(["prepare", str(path)]):
        raise SystemExit(2)
    if lmwright(["train", str(path)]):
        raise SystemExit(2)
    return said.work / name


def losses(place: Path, said: argparse.Namespace, w: Tree | None = None) -> np.ndarray:
    """Mean loss of a token in each piece of the held-out text."""
    loaded = load_model(place)
    w = loaded.weights if w is None else w
    ids = encode_file(loaded, said.held_out, 40 * said.tokens)[: said.tokens]
    pieces = np.split(np.asarray(ids), said.tokens // CONTEXT)
    compute = Compute(precision="fp32")
    return np.array(
        [evaluate_text(loaded.model, w, p, context=CONTEXT, compute=compute).loss for p in pieces]
    )


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    said = parser.parse_args()
    said.work.mkdir(exist_ok=True)
    whole = losses(said.model, said)
    print("| model | perplexity | nats above the model as it is |")
    print("|---|---:|---:|")
    print(f"| as it is | {np.exp(whole.mean()):.2f} | 0 |", flush=True)
    rows = {f"rounded to {GRID}": losses(said.model, said, by_rule(said.model, GRID))}
    show(rows, whole)
    for name in OBJECTIVES:
        show({f"{said.steps} steps, {name}": losses(tuned(name, said), said)}, whole)


def show(rows: dict[str, np.ndarray], whole: np.ndarray) -> None:
    """Prints rows of the table."""
    for name, each in rows.items():
        more = each - whole
        error = 2 * more.std(ddof=1) / len(more) ** 0.5
        print(
            f"| {name} | {np.exp(each.mean()):.2f} | {more.mean():.4f} +- {error:.4f} |", flush=True
        )


if __name__ == "__main__":
    main()
