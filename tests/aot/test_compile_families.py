"""One preset of each family compiles for a TPU slice, with the kernel that knows its windows and
soft caps, near what the analytic plan says of it."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE, Quick
from lmwright.planner.compiler.compile import compile_for
from tests.aot.slices import needs_libtpu, run_of

pytestmark = [pytest.mark.slow, needs_libtpu]

CASES = [
    ("qwen3-0.6b", "v5e-8", 4096, 8, ()),
    ("gemma2-2b", "v6e-8", 8192, 8, ()),
    ("gemma3-1b", "v5e-16", 4096, 16, ()),
    ("mistral-7b", "v5p-16", 8192, 8, ()),
    ("olmo2-1b", "v4-32", 4096, 16, ("mesh.tensor=2",)),
    ("phi-3-mini", "v4-32", 4096, 16, ("mesh.tensor=2",)),
]


@pytest.mark.parametrize(("preset", "where", "seq_len", "batch", "mesh"), CASES)
def test_a_preset_compiles(preset, where, seq_len, batch, mesh, tmp_path):
    seq = f"data.pack.seq_len={seq_len}"
    run, where = run_of(tmp_path, seq, *mesh, preset=preset, batch=batch), parse_slice(where)
    quick, compiled = Quick.of(run, machine_of(where)), compile_for(run, where)
    assert compiled.fits and quick.fits
    assert "long_attention_fwd" in compiled.hlo and "splash" not in compiled.hlo
    assert quick.memory.weights == compiled.weights_bytes
    assert quick.memory.peak == pytest.approx(compiled.peak_bytes, rel=MEMORY_ERROR_SHARE)
