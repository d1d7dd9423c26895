"""Perplexity of a small model in floats, rounded to 4 bits, and tuned with [qat], by the text alone
or beside a teacher, of equal steps.

    python benchmarks/qat_quality.py TEXT.txt HELD_OUT.txt WORK [--steps 400] [--tune 200]

A llama of 0.66 M is trained on TEXT, then tuned for as many steps in floats and with each grid.
The floats are measured as they are and rounded by the grid's own rule, as exporters round. The
teacher is the model as the tuning in floats left it.
"""

import argparse
import math
from pathlib import Path

import jax
import numpy as np

from lmwright.cli.main import main as lmwright
from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.evals.text import encode_file, evaluate_text
from lmwright.formats.load import load_model
from lmwright.program.qat_section import Qat
from lmwright.program.qat_training import rounded, rounded_params, values_of

GRIDS = {
    "int4 of 128": 'qat = {weights = "int4", group_size = 128}',
    "q4_0": 'qat = {weights = "q4_0"}',
}
RUN = """
recipe = "quickstart"
name = "qat"
dir = "{work}/{name}"
{qat}
{objective}
[model]
kind = "llama"
vocab_size = 512
embed_dim = 128
mlp_dim = 384
num_layers = 3
num_heads = 4
num_kv_heads = 2
head_dim = 32
seq_len = 128
[data]
dir = "{work}/data"
sources = [{{path = "{text}"}}]
pack = {{seq_len = 128}}
tokenizer = {{{tokenizer}}}
[train]
steps = {steps}
global_batch_size = 16
{start}
[optim]
learning_rate = {rate}
schedule = {{kind = "{schedule}"}}
[eval]
every_steps = 10_000
[checkpoint]
save_every_steps = 10_000
"""


def trained(work: Path, name: str, **said: object) -> Path:
    """Run directory of a run that is trained if it is not yet."""
    usual = {
        "qat": "",
        "objective": "",
        "start": "",
        "tokenizer": 'train = "bpe", vocab_size = 512',
        "schedule": "cosine",
        "rate": 5e-3,
    }
    path = work / f"{name}.toml"
    path.write_text(RUN.format(**usual | said | {"work": work, "name": name}))
    if not (work / "data").exists() and lmwright(["prepare", str(path)]):
        raise SystemExit(2)
    if lmwright(["train", str(path)]):
        raise SystemExit(2)
    return work / name


def nats(place: Path, text: str, w: Tree | None = None) -> float:
    """Mean loss of a token of a text."""
    loaded = load_model(place)
    w = loaded.weights if w is None else w
    ids = encode_file(loaded, text, 200_000)
    return evaluate_text(loaded.model, w, ids, context=128, compute=Compute()).loss


def by_rule(place: Path, grid: str) -> Tree:
    """The weights of a run, rounded."""
    loaded = load_model(place)
    weights, *group = grid.split(" of ")
    qat = Qat(weights=weights, group_size=int(group[0]) if group else None)  # type: ignore[arg-type]
    run = type("Rounded", (), {"qat": qat, "model": loaded.model, "objective": None})
    params = rounded_params(run, loaded.model.spec())
    return jax.tree.map(np.asarray, values_of(rounded(qat, params, loaded.weights)))


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("held_out")
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tune", type=int, default=200)
    said = parser.parse_args()
    said.work.mkdir(exist_ok=True)
    base = trained(said.work, "base", text=said.text, steps=said.steps)
    tuning = {
        "tokenizer": f'path = "{said.work}/data/tokenizer"', "text": said.text,
        "steps": said.tune, "rate": 5e-4, "schedule": "linear",
        "start": f'init_from = "{base}"',
    }  # fmt: skip
    floats = trained(said.work, "floats", **tuning)
    whole = nats(floats, said.held_out)
    print("| grid | floats | rounded | with [qat] | gap closed | and a teacher | gap closed |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    taught = f'objective = {{kind = "distill", teacher = "{floats}"}}'
    for number, (grid, section) in enumerate(GRIDS.items()):
        run = trained(said.work, f"qat-{number}", qat=section, **tuning)
        student = trained(said.work, f"taught-{number}", qat=section, objective=taught, **tuning)
        after = nats(floats, said.held_out, by_rule(floats, grid))
        row = [grid, f"{math.exp(whole):.3f}", f"{math.exp(after):.3f}"]
        for place in (run, student):
            own = nats(place, said.held_out)
            row += [f"{math.exp(own):.3f}", f"{(after - own) / (after - whole):.0%}"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
