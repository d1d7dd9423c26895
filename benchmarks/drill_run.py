"""Run of a drill: its run files and text, and what is patched in its processes."""

import argparse
import json
import random
from pathlib import Path

RUN = """\
name = "drill"
dir = "{runs}/{name}"

[model]
kind = "llama"
vocab_size = 320
embed_dim = 32
mlp_dim = 48
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
seq_len = 32

[objective]
kind = "clm"

[optim]
kind = "adamw"
learning_rate = 3e-3

[data]
dir = "{root}/data"
workers = 1

[data.shuffle]
epochs = 1000

[[data.sources]]
path = "{root}/text.jsonl"

[data.tokenizer]
vocab_size = 300

[train]
steps = {steps}
global_batch_size = {batch}
precision = "fp32"

[checkpoint]
save_every_steps = {save_every}
memory_every_steps = {memory_every}

[metrics]
log_every_steps = 1
"""
# Every process reads the offset of its clock from a file, so that the clock can jump. In the
# batches of $DRILL_SPOILED one host's rows weigh NaN, so that loss and gradients are NaN.
PATCHES = """\
import importlib.util, os, sys, time
_time = time.time
def jumping():
    try:
        with open(os.environ["DRILL_CLOCK"]) as file:
            return _time() + float(file.read() or 0)
    except (OSError, ValueError, KeyError):
        return _time()
time.time = jumping

class Spoiling:
    def find_spec(self, name, *rest):
        if name != "lmwright.train.feed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), spoil(module.Feed))
        return spec

def spoil(feed):
    host, *steps = map(int, os.environ["DRILL_SPOILED"].split())
    batch, here = feed.batch, int(os.environ.get("JAX_PROCESS_ID", 0)) == host
    def spoiled(self, step):
        arrays = batch(self, step)
        if here and step + 1 in steps:
            arrays = arrays | {"loss_weight": arrays["loss_weight"] * float("nan")}
        return arrays
    feed.batch = spoiled

if os.environ.get("DRILL_SPOILED"):
    sys.meta_path.insert(0, Spoiling())
"""


def prepare(root: Path, runs: str, args: argparse.Namespace) -> int:
    """Writes the run files and prepares the data; returns the number of steps."""
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
    rows = (" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(1200))
    text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (root / "text.jsonl").write_text(text)
    steps = args.steps or 25 * args.faults
    facts = {"root": root, "steps": steps, "batch": 8, "save_every": 10, "memory_every": 3}
    facts["runs"] = runs
    for name in ("calm", "faults"):
        (root / f"{name}.toml").write_text(RUN.format(name=name, **facts))
    return steps
