"""Experts compiled by the TPU compiler: kernels of ragged products, exchange over `expert`."""

import re

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler import cost, hlo
from tests.aot.slices import needs_libtpu, run_of


def compiled(folder, slice_name, *changes):
    run = run_of(folder, *changes, preset="moe-6m", batch=32)
    return aot.compile_for(run, parse_slice(slice_name))


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("slice_name", "changes"),
    [
        ("v5e-8", ("mesh.expert=4",)),
        ("v4-16", ("mesh.expert=2", "mesh.tensor=2", "train.remat=block")),
    ],
)
def test_rows_travel_to_their_experts(slice_name, changes, tmp_path):
    found = compiled(tmp_path, slice_name, *changes)
    assert found.fits
    assert re.search(r" ragged-all-to-all(-start)?\(", found.hlo)
    assert len(re.findall(r"\bt?gmm\b", found.hlo)) > 0, "megablox"
    assert cost.estimate(hlo.parse(found.hlo), parse_slice(slice_name)).unknown_loops == 0


@pytest.mark.slow
@needs_libtpu
def test_places_are_plain_products(tmp_path):
    found = compiled(tmp_path, "v5e-8", "mesh.expert=4", "model.experts.capacity_factor=1.25")
    assert found.fits and not re.search(r"\bt?gmm\b", found.hlo)
    assert re.search(r" all-to-all(-start)?\(", found.hlo)


@pytest.mark.slow
@needs_libtpu
def test_devices_exchange_the_integers_of_a_frozen_base(tmp_path):
    changes = ("mesh.expert=2", "lora.base=int4", 'lora.targets=["all"]', "lora.rank=8")
    found = compiled(tmp_path, "v5e-8", *changes)
    assert found.fits and found.mesh["fsdp"] == 4
    assert re.search(r"= \(?s4\[[^=]* all-gather(-start)?\(", found.hlo)
    # the first factors, gate's and up's, whose rows of 8 numbers are not filled up to 128
    padded = re.findall(r"f32\[\d+,\d+,\d+,8\]\{3,2,[^}]*T\(8,128\)", found.hlo)
    assert not padded, padded[:3]
