"""Block inputs in fewer bits take fewer bytes, by the TPU compiler's own count."""

from functools import cache

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler import compile as aot
from tests.aot.slices import needs_libtpu, run_of

SLICE = "v5e:2x2"
WIDE = (  # so that block inputs are a part that shows
    "model.num_layers=8", "model.embed_dim=512", "model.seq_len=1024", "data.pack.seq_len=1024",
    "train.remat=block",
)  # fmt: skip
VALUES = 8 * 64 // 4 * 1024 * 512  # of the inputs of all blocks on one device


@cache
def compiled(folder, *changes):
    return aot.compile_for(run_of(folder, *WIDE, *changes), parse_slice(SLICE))


def arrays(program):
    """Bytes of the arrays alive at the peak."""
    return program.peak_bytes - program.code_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("aot")


@pytest.mark.slow  # two programs, minutes
@needs_libtpu
@pytest.mark.parametrize("kept, bits", [("int8", 8.5), ("int12", 12.25)])
def test_the_peak_falls_by_the_bits(kept, bits, folder):
    exact, ours = compiled(folder), compiled(folder, f"train.block_inputs={kept}")
    saves = VALUES * (16 - bits) / 8
    assert arrays(exact) - arrays(ours) == pytest.approx(saves, rel=1e-3)
    # the code that packs and unpacks comes once for all layers
    assert 0 < ours.code_bytes - exact.code_bytes < 3 * 2**20
    runs = [run_of(folder, *WIDE, f"train.block_inputs={name}") for name in ("exact", kept)]
    first, then = (Quick.of(run, parse_machine(SLICE)).memory for run in runs)
    assert first.saved == 2 * VALUES
    assert then.saved == pytest.approx(VALUES * bits / 8, rel=1e-3)
    assert first.peak - then.peak == pytest.approx(saves, rel=1e-3)


@pytest.mark.slow
@needs_libtpu
def test_on_the_host_they_take_as_much_less(folder):
    ours = compiled(folder, "train.block_inputs=int8", "train.offload=block_inputs")
    assert ours.host_bytes == pytest.approx(VALUES * 8.5 / 8, rel=0.01)
