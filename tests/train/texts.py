"""Texts of a dozen words, and the run file of a few small steps, for runs that a test trains."""

import itertools
import json

import numpy as np

WORDS = "the cat sat on a mat while one dog ran far away".split()
ROWS = 90


def sentences():
    """The same ones each time, without an end."""
    dice = np.random.default_rng(3)
    while True:
        yield " ".join(dice.choice(WORDS, 9))


def write_texts(path):
    """A jsonl file of texts."""
    rows = ({"text": text} for text in itertools.islice(sentences(), ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


RUN_FILE = """
recipe = "{recipe}"
name = "t"
dir = "{folder}/run"
{top}
[model]
{model}
[data]
dir = "{data}"
workers = 1
{source}
[train]
steps = 4
global_batch_size = 8
precision = "fp32"
{train}
[metrics]
log_every_steps = 1
trackers = []
{more}
"""
MODEL = """
kind = "{kind}"
vocab_size = 320
embed_dim = 64
mlp_dim = 96
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
seq_len = 48
"""
PLAIN = 'remat = "none"\n'  # of [train]
STEADY = """
[optim]
learning_rate = {rate}
schedule = {{kind = "constant"}}
"""


def write_run(
    folder, model, *, recipe="pretrain", top="", data=None, source=None, train=PLAIN, more=""
):
    """The path of a run file: `source` is what [data] says beside its folder, if not the texts of
    the run's own; `more` are sections behind the others."""
    data = data or f"{folder}/data"
    source = source or f'sources = [{{path = "{folder}/text.jsonl"}}]'
    said = {"recipe": recipe, "top": top, "model": model, "data": data, "source": source}
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(folder=folder, train=train, more=more, **said))
    return str(path)
