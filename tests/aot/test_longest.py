"""The longest row of small presets, by the TPU compiler at the answer and at twice it."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.longest import Longest
from tests.aot.slices import needs_libtpu, run_of

SLICE = "v5e:1x1"
OFFLOADED = ("train.remat=block", "train.offload=block_inputs")


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "preset, words",
    [
        ("llama-360m", ()),
        ("qwen3-0.6b", ()),
        ("gemma3-1b", ("lora.rank=8",)),
        ("qwen3-0.6b", OFFLOADED),
        ("qwen3-0.6b", (*OFFLOADED, "train.mlp_chunk_tokens=4096")),
    ],
)
def test_the_compiler_takes_the_answer_and_refuses_twice_it(tmp_path, preset, words):
    run = run_of(tmp_path, "train.remat=none", *words, preset=preset)
    found = Longest.of(run, parse_machine(SLICE))
    estimated = found.options[0].tokens
    found.ask(parse_slice(SLICE), 1)
    first = found.options[0]
    assert first.tokens == estimated  # the estimate was right
    yes, no = first.compiled[estimated], first.compiled[2 * estimated]
    assert yes.fits and yes.peak_bytes <= yes.limit_bytes
    assert not no.fits and no.peak_bytes > no.limit_bytes
