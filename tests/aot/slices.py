"""What tests of ahead-of-time compilation share: when they can run, and a run file."""

import importlib.util
from pathlib import Path

import pytest

from lmwright.formats.open import load_run

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
