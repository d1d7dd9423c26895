"""What lies on the host is no longer on the chip, by the TPU compiler's own bytes."""

import math

import pytest

from lmwright.core.param import walk
from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler import compile as aot
from lmwright.planner.report import Report
from lmwright.program.trainee import training_of
from tests.aot.int32 import LIMIT, MOVED, too_large, widest
from tests.aot.slices import needs_libtpu, run_of

SLICE = "v5e:2x2"
SMALL = ("model.num_layers=2", "train.remat=block", "train.mlp_chunk_tokens=128")
GIB = 2**30


def moments(run):
    """Bytes of the two moments of all matrices."""
    params = [p for t in training_of(run).trainees for _, p in walk(t.spec) if p.is_matrix]
    return sum(8 * math.prod(p.shape) for p in params)


@pytest.mark.slow  # tests/aot/test_block_inputs.py compiles a smaller one
@needs_libtpu
def test_block_inputs_and_moments_are_on_the_host(tmp_path):
    changes = (*SMALL, "train.offload=block_inputs", "optim.offload=moments")
    run = run_of(tmp_path, *changes, batch=16)
    where = parse_slice(SLICE)
    found = aot.compile_for(run, where)
    work = run.model.work(256)
    inputs = work.num_layers * 16 * 256 * work.embed_dim * 2
    assert found.host_bytes == pytest.approx((inputs + moments(run)) / 4, rel=0.05)  # tiles
    quick = Quick.of(run, parse_machine(SLICE)).memory
    assert quick.host == pytest.approx((inputs + moments(run)) / 4, rel=1e-3)
    assert found.optimizer_bytes < 0.01 * found.host_bytes
    took = Report(run, where, found).estimate
    # activations once there and once back, moments in and out
    assert took.host_bytes == pytest.approx(2 * found.host_bytes, rel=0.05)
    assert took.by_kind["exposed host transfers"] > 0
    assert "of the host's memory" in "\n".join(Report(run, where, found).lines())


@pytest.mark.slow
@needs_libtpu
def test_the_long_example_fits_where_it_did_not(tmp_path):
    """Gemma 2 9B, rows of 32,768 tokens, one a chip, AdamW in float32."""
    lengths = "model.seq_len=32768", "data.pack.seq_len=32768"
    changes = "train.offload=block_inputs", "train.mlp_chunk_tokens=4096", "train.remat=block"
    run = run_of(tmp_path, *lengths, *changes, preset="gemma2-9b", batch=8)
    found = aot.compile_for(run, parse_slice("v6e-8"))
    assert found.fits and found.peak_bytes < 31.25 * GIB
    assert found.host_bytes == 42 * 32768 * 3584 * 2
    # int32 counts every array on the chip, and every axis. The inputs of 21 blocks on the host have
    # more elements; they are moved block by block.
    large = too_large(found.hlo)
    assert {dims for _, dims, _ in large} == {(21, 1, 32768, 3584)}
    assert all(on_host and opcode in MOVED for opcode, _, on_host in large)
    assert widest(found.hlo) < LIMIT
