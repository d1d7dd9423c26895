"""The step of adapters compiled by the TPU compiler: int4 and int8 bases on a slice."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler import compile as aot
from tests.aot.programs import check_compiled
from tests.aot.slices import needs_libtpu, run_of

LAYERS = ("model.num_layers=2",)
INT4 = ("lora.base=int4", "lora.rank=8")
TWO = ("lora.base=int8", 'lora.adapters=[{name = "a", rank = 4}, {name = "b", rank = 6}]')


@needs_libtpu
@pytest.mark.parametrize(
    "changes",
    [INT4, pytest.param(TWO, marks=pytest.mark.slow)],
    ids=["one over int4", "two over int8"],
)
def test_the_step_compiles_and_the_base_is_small(changes, tmp_path):
    run = run_of(tmp_path, *LAYERS, *changes, batch=16)
    found = aot.compile_for(run, parse_slice("v5e:2x2"))
    assert found.fits and found.mesh["fsdp"] == 4
    # the optimizer knows the adapters alone
    assert found.optimizer_bytes < 0.2 * found.num_params
    assert found.argument_bytes < 2 * found.num_params
    if changes == INT4:
        assert " s4[" in found.hlo
        check_compiled("llama-15m v5e:2x2 lora", found, parse_slice("v5e:2x2"))


@needs_libtpu
@pytest.mark.slow
def test_the_step_that_remains_when_an_adapter_ends(tmp_path):
    """The very program that train compiles then: its state still holds both."""
    run = run_of(tmp_path, *LAYERS, *TWO, batch=16)
    both = aot.compile_for(run, parse_slice("v5e:2x2"))
    last = aot.compile_for(run, parse_slice("v5e:2x2"), trainees=("b",))
    assert last.optimizer_bytes == both.optimizer_bytes and last.fits
    assert last.tokens_per_step == both.tokens_per_step / 2
    assert last.peak_bytes < both.peak_bytes
