"""The mLSTM kernels compiled for every TPU generation that runs them, and what `plan` reckons."""

import json

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

pytestmark = needs_libtpu

CHILD = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.kernels import tpu_mlstm
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse

def kernels_of(slice_name, b, t, n, k, h, size):
    where = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**where).devices[0])
    array = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((b, t, *s), dtype, sharding=place)
    def loss(*arrays):
        return jnp.sum(tpu_mlstm.mlstm(*arrays, size).astype(jnp.float32) ** 2)
    gate = array(n, dtype=jnp.float32)
    args = array(n, k), array(n, k), array(n, h), gate, gate, array(dtype=jnp.int32)
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*args).compile().as_text()
    cost = estimate(parse(text), parse_slice(slice_name)).by_kind.get("attention")
    return text.count('custom_call_target="tpu_custom_call"'), cost

print(json.dumps([kernels_of(*case) for case in json.loads(sys.argv[1])]))
"""
SLICES = ("v5e-4", "v4-8", "v5p-8", "v6e-4", "7x-8")


def kernels_of(*cases):
    """[number of kernels, seconds that plan reckons with] of each."""
    return json.loads(with_compiler("-c", CHILD, json.dumps(cases), timeout_s=600))


def test_the_kernels_compile():
    """Forward, memories before the chunks, backward."""
    [[kernels, cost]] = kernels_of(("v5e-4", 1, 256, 1, 128, 256, 128))
    assert kernels == 3 and cost > 0


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_every_generation_compiles_the_kernels(slice_name):
    """In heads of the presets; twice the heads cost twice as much."""
    large = (512, 1, 256, 512, 128)
    found = kernels_of(
        (slice_name, 1, *large), (slice_name, 2, *large), (slice_name, 1, 512, 2, 96, 192, 64),
        (slice_name, 1, 512, 2, 256, 512, 256),
    )  # fmt: skip
    assert [kernels for kernels, _ in found] == [3] * 4
    costs = [cost for _, cost in found]
    assert costs[1] == pytest.approx(2 * costs[0]) and min(costs) > 0


def test_early_chips_have_no_cost_of_it():
    from lmwright.planner.compiler.mlstm_cost import CYCLES, WAYS

    assert set(CYCLES) == {"v4", "v5e", "v5p", "v6e", "7x"}
    assert all(set(ways) == set(WAYS) for ways in CYCLES.values())
