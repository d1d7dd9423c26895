"""The kernels of memories, compiled for every TPU generation that runs them, and what `plan`
reckons."""

import json

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

pytestmark = needs_libtpu

CHILD = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.kernels import tpu_mlstm
from lmwright.kernels.delta_rule_by import delta_rule
from lmwright.kernels.ssd_by import ssd
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse

RULES = {"mlstm": tpu_mlstm.mlstm, "delta rule": partial(delta_rule, kernels="tpu"),
         "ssd": partial(ssd, kernels="tpu")}

def kernels_of(name, slice_name, b, t, n, k, h, size, keys=None):
    where = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**where).devices[0])
    array = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((b, t, *s), dtype, sharding=place)
    def loss(*arrays):
        return jnp.sum(RULES[name](*arrays, size).astype(jnp.float32) ** 2)
    gate = array(n, dtype=jnp.float32)
    args = array(keys or n, k), array(keys or n, k), array(n, h), gate, gate, array(dtype=jnp.int32)
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
    """Forward, memories before the chunks, backward; forward and backward."""
    found = kernels_of(
        ("mlstm", "v5e-4", 1, 256, 1, 128, 256, 128),
        ("delta rule", "v5e-4", 1, 256, 2, 128, 128, 64, 1),
        ("ssd", "v5e-4", 1, 256, 4, 128, 64, 128, 1),
    )
    assert [kernels for kernels, _ in found] == [3, 2, 2] and all(cost > 0 for _, cost in found)


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_every_generation_compiles_the_kernels(slice_name):
    """In heads of the presets; twice the heads cost twice as much."""
    large = (512, 1, 256, 512, 128)
    found = kernels_of(
        ("mlstm", slice_name, 1, *large), ("mlstm", slice_name, 2, *large),
        ("mlstm", slice_name, 1, 512, 2, 96, 192, 64),
        ("mlstm", slice_name, 1, 512, 2, 256, 512, 256),
    )  # fmt: skip
    assert [kernels for kernels, _ in found] == [3] * 4
    costs = [cost for _, cost in found]
    assert costs[1] == pytest.approx(2 * costs[0]) and min(costs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_every_generation_compiles_the_delta_rule(slice_name):
    """With one to eight heads of values for each of keys, in both sizes of chunks, and heads that
    do not fill the lanes."""
    found = kernels_of(
        *(("delta rule", slice_name, 1, 512, 4 * times, 128, 128, 64, 4) for times in (1, 2, 3)),
        ("delta rule", slice_name, 1, 512, 8, 128, 128, 128, 4),
        ("delta rule", slice_name, 1, 512, 2, 64, 96, 64, 2),
        ("delta rule", slice_name, 1, 512, 8, 128, 128, 64, 1),
    )
    assert [kernels for kernels, _ in found] == [2] * 6
    costs = [cost for _, cost in found]
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.01) and costs[3] < costs[1]


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_every_generation_compiles_the_state_spaces(slice_name):
    """In heads of the presets, several steps of one group; in one head, and all sizes of chunks."""
    found = kernels_of(
        *(("ssd", slice_name, 1, 512, heads, 128, 64, 128, 1) for heads in (48, 96)),
        *(("ssd", slice_name, 1, 512, 8, 128, 64, size, 2) for size in (64, 128, 256)),
        ("ssd", slice_name, 1, 512, 2, 64, 96, 128, 1),
        ("ssd", slice_name, 1, 512, 48, 128, 32, 256, 1),
    )
    assert [kernels for kernels, _ in found] == [2] * 7
    costs = [cost for _, cost in found]
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.01)


def test_early_chips_have_no_cost_of_it():
    from lmwright.planner.compiler.recurrence_cost import CYCLES, WAYS

    assert set(CYCLES) == {"v4", "v5e", "v5p", "v6e", "7x"}
    every = {way for ways in WAYS.values() for way in ways}
    assert all(set(ways) == every for ways in CYCLES.values())
