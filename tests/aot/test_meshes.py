"""Meshes over the devices of slices that are not here: each can be laid out, and where there
are several slices only the data axis crosses them."""

import itertools
import json
import math

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

SLICES = ("v4-32", "v5e-16", "v3-8", "2xv5e-8")


def lay_out(slice_name):
    """{"made": n, "refused": n, "crossed": axes} over all meshes of four axes."""
    from jax.experimental import topologies

    from lmwright.core.sharding import AXES, make_mesh
    from lmwright.errors import UserError
    from lmwright.hardware.slices import parse_slice, topology_request

    devices = topologies.get_topology_desc(**topology_request(parse_slice(slice_name))).devices
    sizes = [d for d in range(1, len(devices) + 1) if len(devices) % d == 0]
    made, refused, crossed = 0, 0, set()
    for picked in itertools.product(sizes, repeat=4):
        if math.prod(picked) != len(devices):
            continue
        shape = dict.fromkeys(AXES, 1) | dict(
            zip(("data", "fsdp", "context", "tensor"), picked, strict=True)
        )
        try:
            mesh = make_mesh(shape, devices)
        except UserError:
            refused += 1
            continue
        made += 1
        assert len({d.id for d in mesh.devices.flat}) == len(devices)
        for at, device in zip(
            itertools.product(*map(range, mesh.devices.shape)), mesh.devices.flat, strict=True
        ):
            for i, axis in enumerate(AXES):
                first = mesh.devices[(*at[:i], 0, *at[i + 1 :])]
                if getattr(first, "slice_index", 0) != getattr(device, "slice_index", 0):
                    crossed.add(axis)
    return {"made": made, "refused": refused, "crossed": sorted(crossed)}


@pytest.fixture(scope="module")
def found():
    return json.loads(with_compiler("-m", __name__).splitlines()[-1])


@needs_libtpu
def test_every_mesh_of_one_slice_can_be_made(found):
    for name, devices in (("v4-32", 16), ("v5e-16", 16), ("v3-8", 8)):
        power = devices.bit_length() - 1
        assert found[name] == {"made": math.comb(power + 3, 3), "refused": 0, "crossed": []}


@needs_libtpu
def test_only_data_crosses_slices(found):
    assert found["2xv5e-8"] == {"made": 20, "refused": 15, "crossed": ["data"]}


if __name__ == "__main__":
    print(json.dumps({name: lay_out(name) for name in SLICES}))
