"""What tests of ahead-of-time compilation share: when they can run, and a run file."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmwright.formats.open import load_run
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install libtpu"
)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN = """
name = "aot"
dir = "run"
recipe = "pretrain"
model.preset = "{preset}"
[data]
dir = "data"
tokenizer.vocab_size = 1024
sources = [{{path = "text"}}]
[train]
steps = 1000
global_batch_size = {batch}
"""


def run_of(folder, *overrides, preset="llama-15m", batch=64):
    """The run of a file in `folder`, which is written."""
    path = folder / "run.toml"
    path.write_text(RUN.format(preset=preset, batch=batch))
    return load_run(path, overrides)


def with_compiler(*words, timeout_s=300):
    """Output of a Python process that uses the TPU compiler, for `words` after `python`."""
    environment = os.environ | COMPILER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
