"""Resolved plans of presets on slices, as they were looked at and found right.

After a change that is meant: `LMWRIGHT_GOLDEN=write pytest tests/golden`, and read the diff.
"""

import json
import os
from pathlib import Path

import pytest

from lmwright.core.param import walk
from lmwright.formats.open import load_run
from lmwright.planner.analytic.layout import on_paper
from lmwright.planner.analytic.machine import parse_machine

RUN = """
name = "golden"
dir = "run"
recipe = "pretrain"
model.preset = "{preset}"
data.dir = "data"
train.steps = 1000
train.global_batch_size = {rows}
"""

CASES = [
    ("kisoku-3b", "v4-32", 128, ()),
    ("llama-1b", "v5e-8", 32, ("mesh.context=2", "data.pack.seq_len=8192")),
    ("llama-8b", "v5p-128", 64, ("mesh.tensor=4",)),
    ("llama-70b", "2xv5e-256", 1024, ("mesh.data=2", "train.num_microbatches=2")),
    ("llama-13b", "v6e-64", 64, ("mesh.stage=2", "mesh.tensor=2", "train.num_microbatches=4")),
    ("600b", "v5p-1024", 512, ("mesh.expert=2", "mesh.tensor=8")),
]


def specs(tree) -> dict[str, str]:
    """Mesh axes of each dimension, by path; stacked weights once."""
    entries = lambda spec: " ".join(_entry(e) for e in spec)  # noqa: E731
    return {path: entries(leaf.spec) for path, leaf in walk_leaves(tree)}


def _entry(entry) -> str:
    return "+".join(entry) if isinstance(entry, tuple) else entry or "-"


def walk_leaves(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from walk_leaves(value, (*path, name))
        else:
            yield ".".join((*path, name)), value


@pytest.mark.parametrize("preset, slice_name, rows, overrides", CASES)
def test_the_plan_is_the_golden_one(preset, slice_name, rows, overrides, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(preset=preset, rows=rows))
    plan = on_paper(load_run(path, overrides), parse_machine(slice_name))
    assert {name for name, _ in walk(plan.spec)} == set(specs(plan.shardings))
    got = {
        "mesh": dict(plan.mesh.shape),
        "num_params": plan.num_params,
        "tokens_per_step": plan.tokens_per_step,
        "flops_per_step": plan.flops_per_step,
        "weights": specs(plan.shardings),
    }
    golden = Path(__file__).with_name(f"{preset}_{slice_name}.json")
    if os.environ.get("LMWRIGHT_GOLDEN") == "write":
        golden.write_text(json.dumps(got, indent=1) + "\n")
    assert got == json.loads(golden.read_text())
