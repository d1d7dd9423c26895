"""Machines: names, what is said of wrong ones, tori."""

import os

import pytest

from lmwright.core.compute import EARLY
from lmwright.core.weight import TORUS
from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import GPUS, peak_of
from lmwright.planner.analytic.machine import parse_machine


@pytest.mark.parametrize(
    "text, name, chips, devices, groups",
    [
        ("tpu:v4-32", "v4-32", 16, 16, 1),
        ("v3-8", "v3-8", 4, 8, 1),
        ("2xv5e-256", "2xv5e-256", 512, 512, 2),
        ("gpu:h200x8", "gpu:h200x8", 8, 8, 1),
        ("GPU:A100-40GBx4", "gpu:a100-40gbx4", 4, 4, 1),
        ("gpu:h100", "gpu:h100x1", 1, 1, 1),
        ("gpu:h100x64", "gpu:h100x64", 64, 64, 8),
        ("cpu:8", "cpu:8", 8, 1, 1),
    ],
)
def test_names(text, name, chips, devices, groups):
    found = parse_machine(text)
    assert (found.name, found.num_chips, found.num_devices) == (name, chips, devices)
    assert found.num_groups == groups
    assert parse_machine(found.name) == found


@pytest.mark.parametrize("name", GPUS)
def test_every_card_goes_by_its_name(name):
    """Also those that end in a number."""
    assert parse_machine(f"gpu:{name}") == parse_machine(f"gpu:{name}x1")
    assert parse_machine(f"gpu:{name}x8").num_devices == 8
    with pytest.raises(UserError, match=f"did you mean gpu:{name}x8"):
        parse_machine(name)


@pytest.mark.parametrize(
    "text, words",
    [
        ("gpu:h20x8", ["did you mean gpu:h200x8?"]),
        ("gpu:rtx4080", ["there is no GPU rtx4080", "gpu:rtx4090x1"]),
        ("gpu:rtx4080x2", ["there is no GPU rtx4080", "gpu:rtx4090x2"]),
        ("gpu:tpux8", ["there is no GPU", "gpu:h100x8"]),
        ("gpu:t4x2", ["there is no GPU t4", "gpu:l4x2"]),
        ("h100", ["unknown machine", "did you mean gpu:h100x8?", "v4-32"]),
        ("h200x16", ["did you mean gpu:h200x16?"]),
        ("gpu", ["how many", "gpu:h100x8"]),
        ("colab", ["unknown machine", "cpu:8"]),
        ("gpu:h100x12", ["do not fill nodes of 8", "gpu:h100x16"]),
        ("gpu:h100x0", ["gpu:h100x8"]),
        ("cpu:many", ["cpu:8"]),
        ("cpu:0", ["cpu:8"]),
        ("v5f-8", ["nearest", "v5e-8"]),
    ],
)
def test_wrong_names_get_the_nearest(text, words):
    with pytest.raises(UserError) as error:
        parse_machine(text)
    assert all(word in str(error.value) for word in words), error.value


def test_the_cores_of_this_host():
    cores = len(os.sched_getaffinity(0))
    assert parse_machine("cpu") == parse_machine(f"cpu:{cores}")


def test_every_kind_is_known_by_what_jax_reports():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert {*EARLY, *TORUS} < set(kinds)
    assert all(peak_of(kind).usable_bytes or kind == "TPU v2" for kind in kinds)
    assert peak_of("cpu") is None
    for kind in GPUS:
        found = parse_machine(f"gpu:{kind}x8")
        assert found.usable_bytes == int(0.75 * peak_of(GPUS[kind].device_kind).hbm_bytes)


@pytest.mark.parametrize(
    "name, sizes, whole",
    [
        ("v4-32", {"fsdp": 16}, True),  # 2 x 2 x 4
        ("v4-32", {"fsdp": 8, "tensor": 2}, True),
        ("v4-32", {"fsdp": 4, "tensor": 4}, True),
        ("v5e-64", {"fsdp": 16, "tensor": 4}, False),  # 8 x 8
        ("v5e-64", {"fsdp": 8, "tensor": 8}, True),
        ("2xv5e-64", {"data": 2, "fsdp": 8, "tensor": 8}, True),
        ("gpu:h100x8", {"fsdp": 2, "tensor": 4}, True),
    ],
)
def test_meshes_of_whole_torus_axes(name, sizes, whole):
    assert parse_machine(name).fits_torus({"data": 1} | sizes) is whole


def test_links_are_those_that_the_compiled_program_is_costed_by():
    machine = parse_machine("v4-32")  # 2 x 2 x 4: too small to close; four are 2 x 2 or a line
    assert [machine.links(ways) for ways in (2, 4, 8, 16)] == [1, 2, 2, 3]
    assert parse_machine("v5p-128").links(64) == 6
    assert parse_machine("v5e-64").links(2) == 1  # a piece of an axis of 8
    assert parse_machine("gpu:h100x8").links(8) == 1
