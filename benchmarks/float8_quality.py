"""Loss curves of one small model in fp32, bf16 and 8-bit floats, from the same weights and batches.

    python benchmarks/float8_quality.py TEXT.txt WORK [--steps 600]

A llama of 1.2 M is trained on TEXT on this machine. A row is the mean loss of a sixth of the steps.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from lmwright.cli.main import main as lmwright

PRECISIONS = ("fp32", "bf16", "fp8")
RUN = """
recipe = "quickstart"
name = "float8"
dir = "{work}/run"
[model]
kind = "llama"
vocab_size = 1024
embed_dim = 128
mlp_dim = 384
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 32
seq_len = 128
[data]
dir = "{work}/data"
sources = [{{path = "{text}"}}]
pack = {{seq_len = 128}}
tokenizer = {{train = "bpe", vocab_size = 1024}}
[train]
steps = {steps}
global_batch_size = 16
[optim]
learning_rate = 3e-3
schedule = {{kind = "cosine"}}
[metrics]
log_every_steps = 1
[eval]
every_steps = 10_000
[checkpoint]
save_every_steps = 10_000
"""


def losses(path: Path, work: Path, precision: str) -> np.ndarray:
    """Loss of each step, of a run that is trained if it is not yet."""
    folder = work / precision
    if lmwright(["train", str(path), f"dir={folder}", f"train.precision={precision}"]):
        raise SystemExit(2)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return np.array([line["loss"] for line in lines if line["kind"] == "train"])


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    path, work = args.work / "run.toml", args.work.absolute()
    path.write_text(RUN.format(work=work, text=args.text.absolute(), steps=args.steps))
    if lmwright(["prepare", str(path)]):
        raise SystemExit(2)
    curves = {precision: losses(path, work, precision) for precision in PRECISIONS}
    print(f"| steps | {' | '.join(PRECISIONS)} | bf16 over fp32 | fp8 over fp32 |")
    print("|---|---:|---:|---:|---:|---:|")
    for steps in np.array_split(np.arange(args.steps), 6):
        exact, *others = (curve[steps].mean() for curve in curves.values())
        row = [exact, *others], [other / exact - 1 for other in others]
        means, beside = ([f"{value:{form}}" for value in part]
                         for part, form in zip(row, (".4f", "+.2%"), strict=True))  # fmt: skip
        print(f"| {steps[0] + 1} to {steps[-1] + 1} | {' | '.join([*means, *beside])} |")


if __name__ == "__main__":
    main()
