"""Long rows: adding up the gradient of the head once a step is offered where it fits."""

import pytest

from lmwright.planner.analytic.candidates import candidates, summed_once
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import head_bytes, loss_bytes
from lmwright.planner.analytic.quick import Quick
from tests.aot.slices import run_of

ONCE = "train.head_gradient=once"
LONG = "model.seq_len=32768", "data.pack.seq_len=32768", "train.remat=block"


def best(run, name):
    return candidates(run, parse_machine(name), meshes=[run.mesh])[0]


def test_it_is_the_fastest_way_of_long_rows(tmp_path):
    run = run_of(tmp_path, *LONG, preset="llama-1b", batch=16)
    found = best(run, "v6e-8")
    assert ONCE in found.overrides and "head's gradient once" in found.label
    assert not found.changes_training


@pytest.mark.parametrize("changes", [(ONCE,), ("lora.rank=8",), ("train.loss_chunk_tokens=8192",)])
def test_it_is_not_offered_twice_or_where_it_brings_little(tmp_path, changes):
    run = run_of(tmp_path, *LONG, *changes, preset="llama-1b", batch=16)
    assert summed_once(best(run, "v6e-8")) is None


def test_it_takes_memory_of_the_head(tmp_path):
    """At least float32 of the whole head on each device, less the shard that is there anyway."""
    run = run_of(tmp_path, *LONG, preset="llama-1b", batch=16)
    machine = parse_machine("v6e-8")
    once = run_of(tmp_path, *LONG, ONCE, preset="llama-1b", batch=16)
    before, after = (Quick.of(each, machine) for each in (run, once))
    (near,), (far,) = before.layouts, after.layouts
    head = 4 * run.model.vocab_size * run.model.embed_dim
    assert head_bytes(far) + loss_bytes(far) >= head  # there in every chunk of the loss
    assert loss_bytes(far) > loss_bytes(near)
    assert after.memory.peak >= before.memory.peak
    assert after.step_s < before.step_s


def test_it_is_taken_back_where_it_does_not_fit(tmp_path):
    once = run_of(tmp_path, *LONG, ONCE, "train.mlp_chunk_tokens=4096", preset="gemma2-9b", batch=8)
    found = best(once, "v5e-8")
    assert found.quick.fits and "train.head_gradient=by_chunk" in found.overrides
