"""Nothing in a program for long rows counts beyond int32, and leaves may have more elements."""

import json
import math

import pytest

from tests.aot.int32 import LIMIT, too_large, widest
from tests.aot.slices import EXAMPLES, needs_libtpu, with_compiler

TRACED = """
import json, math, sys
import jax
from jax.experimental import topologies
from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import make_step

def shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from ((equation.primitive.name, tuple(v.aval.shape)) for v in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from shapes(getattr(inner, "jaxpr", inner))

is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
devices = topologies.get_topology_desc(**topology_request(parse_slice("v6e-8"))).devices
plan = resolve(load_run(sys.argv[1], sys.argv[2:]), devices)
with jax.set_mesh(plan.mesh):
    state, batch = abstract_state(plan), abstract_batch(plan)
    traced = make_step(plan).trace(state, batch)
found = {shape for _, shape in shapes(traced.jaxpr.jaxpr)}
local = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state)]
print(json.dumps({
    "arrays": len(found),
    "large": sorted({s for s in found if math.prod(s) >= 2**31}),
    "widest": max(max(s, default=1) for s in found),
    "state": max(math.prod(s) for s in local),
}))
"""

ADAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lmwright.core.param import Param, stack
from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.optim.build import build_optimizer
from lmwright.optim.kinds import Adam8bit

spec = {"layers": stack({"up": Param("embed -> mlp", (3584, 14336))}, 42)}
where = topology_request(parse_slice("v5p-8"))
place = SingleDeviceSharding(topologies.get_topology_desc(**where).devices[0])
optimizer = build_optimizer(Adam8bit(learning_rate=1e-3), spec, 10)
on = lambda tree: jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)
w = on({"layers": {"up": jax.ShapeDtypeStruct((42, 3584, 14336), jnp.float32)}})
state = on(jax.eval_shape(optimizer.init, w))
step = jax.jit(optimizer.update, donate_argnums=(0, 1))
open(sys.argv[1], "w").write(step.lower(w, state, w).compile().as_text())
"""


def child(code, *words):
    """What a program printed that uses the TPU compiler."""
    return with_compiler("-c", code, *words, timeout_s=1200)


def test_the_check_sees_arrays_of_every_kind():
    text = """
  %a = bf16[3,1000000000]{1,0:T(8,128)} add(%x, %y)
  %b = (f32[], s8[21,1,32768,3584]{3,2,1,0:T(8,128)S(5)}) while(%t), body=%c
  ROOT %c = u32[7]{0} iota(), iota_dimension=0
"""
    assert too_large(text) == {
        ("add", (3, 1000000000), False), ("while", (21, 1, 32768, 3584), True),
    }  # fmt: skip
    assert widest(text) == 1000000000


@pytest.mark.slow
@needs_libtpu
def test_no_flat_index_in_the_program_of_the_long_example():
    """gemma2-9b-32k.toml for v6e-8, as it is traced for all devices together: there are arrays of
    more than 2^31 elements, but no axis that long, so every index along an axis fits. What each
    device holds of the state is smaller. (Pallas kernels are traced as one operation here.)"""
    changes = ("train.offload=block_inputs", "train.mlp_chunk_tokens=4096")
    found = json.loads(child(TRACED, EXAMPLES / "gemma2-9b-32k.toml", *changes))
    assert found["arrays"] > 50
    assert [42 // 2, 8, 32768, 3584] in found["large"]  # inputs of blocks, of each of two kinds
    assert found["widest"] < LIMIT and found["state"] < LIMIT


@pytest.mark.slow
@needs_libtpu
def test_8_bit_adam_of_a_leaf_beyond_int32(tmp_path):
    """A stack of Gemma 2 9B's matrices whole on one chip, 2.16e9 elements: the TPU compiler takes
    it, and no array that it makes has an axis, as a flat index would need, of that size."""
    child(ADAM, tmp_path / "step.hlo")
    hlo = (tmp_path / "step.hlo").read_text()
    shapes = {dims for _, dims, _ in too_large(hlo)}
    assert (42, 3584, 14336) in shapes and all(math.prod(s) >= LIMIT for s in shapes)
    assert widest(hlo) < LIMIT
