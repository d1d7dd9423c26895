"""The step of adapters compiled by the TPU compiler: int4 and int8 bases on a slice."""

import importlib.util

import pytest

from podsmith.config import load_run
from podsmith.plan import compile as aot
from podsmith.plan.topology import parse_slice

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install libtpu"
)

RUN = """
name = "aot"
dir = "run"
recipe = "pretrain"
model = {preset = "llama-15m", num_layers = 2}
train = {steps = 1000, global_batch_size = 16}
[data]
dir = "data"
tokenizer.vocab_size = 1024
sources = [{path = "text"}]
[lora]
base = "int4"
rank = 8
"""
TWO = """
base = "int8"
adapters = [{name = "a", rank = 4}, {name = "b", rank = 6}]
"""


@needs_libtpu
@pytest.mark.parametrize(
    "text",
    [RUN, pytest.param(RUN.replace('base = "int4"', TWO), marks=pytest.mark.slow)],
    ids=["one over int4", "two over int8"],
)
def test_the_step_compiles_and_the_base_is_small(text, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    run = load_run(path)
    found = aot.compile_for(run, parse_slice("v5e:2x2"))
    assert found.fits and found.mesh["fsdp"] == 4
    # the optimizer knows the adapters alone
    assert found.optimizer_bytes < 0.2 * found.num_params
    assert found.argument_bytes < 2 * found.num_params
    if "int4" in text:
        assert " s4[" in found.hlo
