"""The attention kernel compiled for every TPU generation, forward and backward."""

import importlib.util
import json

import pytest

from lmwright.hardware.chips import CHIPS
from lmwright.planner.compiler.kernel_cost import row_attention_cycles
from tests.aot.slices import with_compiler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is absent: pip install libtpu"
)

CHILD = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lmwright.kernels import tpu_attention, tpu_disentangled, tpu_interval_attention
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.disentangled import Disentangled
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.hardware.slices import parse_slice, topology_request

def kernels_of(slice_name, b, t, n, k, h, choices):
    where = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**where).devices[0])
    array = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype, sharding=place)
    pieces = choices.pop("pieces", 1)
    def loss(q, k, v, ids):
        early = slice_name.startswith(("v2", "v3"))
        if "distances" in choices:
            far, scoring = [table] * 2, Disentangled(0.1, 512)
            attend = tpu_disentangled.attention
            strided = slice_name[:2] != "v4"
            out = attend(q, k, v, *far, ids, scoring, strided=strided)
            return jnp.sum(out.astype(jnp.float32) ** 2)
        if "reach" in choices:
            near = choices["reach"]
            seen, reach = intervals.both_ways(ids, near), intervals.both_ways_reach(near)
            attend, rest = tpu_interval_attention.attention, (seen, Scoring(0.1), reach)
        else:
            attend, rest = tpu_attention.causal_attention, (ids, Scoring(0.1, **choices))
        out = attend(q, k, v, *rest, early=early)
        return jnp.sum(out.astype(jnp.float32) ** 2)
    whole = lambda heads: array(b * pieces, t // pieces, heads, h)
    args = whole(n), whole(k), whole(k), array(b, t, dtype=jnp.int32)
    table = jnp.ones((512, n, h), jnp.bfloat16)
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile().as_text()
    cost = estimate(parse(text), parse_slice(slice_name)).by_kind.get("attention")
    return text.count('custom_call_target="tpu_custom_call"'), "row_attention_bwd" in text, cost

print(json.dumps([kernels_of(*case) for case in json.loads(sys.argv[1])]))
"""

GENERATIONS = ("v2-8", "v3-8", "v4-8", "v5e-4", "v5p-8", "v6e-4", "7x-8")
EARLY = ("v2-8", "v3-8")
SHAPES = [(1, 2048, 4, 1, 96), (1, 2048, 4, 2, 64), (1, 2048, 2, 1, 256), (1, 8192, 2, 1, 128)]
LOCAL = {"window": 512, "soft_cap": 50.0}


def kernels_of(cases):
    """[number of kernels, whether whole rows, seconds that plan reckons with] of each."""
    return json.loads(with_compiler("-c", CHILD, json.dumps(cases), timeout_s=600))


@pytest.mark.parametrize(
    "names", [("v3-8", "v5e-4", "v6e-4"), pytest.param(GENERATIONS, marks=pytest.mark.slow)]
)
def test_every_generation_compiles_the_kernel(names):
    answers = kernels_of([(name, *SHAPES[0], {}) for name in names])
    found = dict(zip(names, answers, strict=True))
    # one each way
    assert {name: kernels for name, (*kernels, _) in found.items()} == {
        name: [2, name not in EARLY] for name in names
    }
    assert all(cost > 0 for *_, cost in answers)


def test_a_near_layer_that_looks_both_ways_costs_its_band():
    """With heads of 64 as in ModernBERT, whose near layers see 64 tokens before and after."""
    shape = (1, 8192, 1, 1, 64)
    whole, near, causal = kernels_of(
        [("v5e-4", *shape, choices) for choices in ({"reach": None}, {"reach": 64}, {})]
    )
    assert [kernels for kernels, _, _ in (whole, near, causal)] == [2, 2, 2]
    assert near[-1] <= whole[-1] / 8
    assert 1.7 < whole[-1] / causal[-1] < 2


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", GENERATIONS)
def test_every_generation_compiles_kernels_that_look_both_ways(slice_name):
    """Whole rows, and long ones; near layers of these in bands, and in blocks."""
    early = slice_name in EARLY
    cases = [(slice_name, 2, 1024, 4, 2, 64, {"reach": near}) for near in (None, 64)]
    cases += [(slice_name, 1, 8192, 2, 1, 128, {"reach": near}) for near in (None, 64, 2048)]
    cases += [(slice_name, 1, 4096, 2, 1, 256, {"reach": near}) for near in (None, 128)]
    found = kernels_of(cases)
    long = [0 if early else 2, False]
    assert [kernel for *kernel, _ in found[:5]] == [[2, not early]] * 2 + [long] * 3
    assert [kernel for *kernel, _ in found[5:]] == [[2, False]] * 2
    row, near_row, whole, near, far, wide, near_wide = (cost for *_, cost in found)
    assert 0 < near_row <= row and (early or near < far < whole) and 0 < near_wide < wide


@pytest.mark.slow
def test_every_generation_with_the_kernel_of_long_rows_compiles_rows_in_pieces():
    names = [name for name in GENERATIONS if name not in EARLY]
    shape = (1, 8192, 2, 1, 96)
    found = kernels_of(
        [(name, *shape, choices) for name in names for choices in ({}, {"pieces": 4})]
    )
    assert [kernel for *kernel, _ in found] == [[2, False]] * len(found)
    assert found[::2] == found[1::2]  # of the same cost


@pytest.mark.slow
def test_plan_counts_the_blocks_that_the_compiled_kernels_visit():
    """Of one row as of two, and of a window only what it lets through."""
    long, short = (8192, 1, 1, 128), (2048, 4, 2, 128)
    cases = [(1, *long, {}), (2, *long, {}), (1, *long, {"window": 1024}),
             (1, *short, {}), (1, *short, {"window": 512})]  # fmt: skip
    alone, two, local, row, local_row = (
        cost for *_, cost in kernels_of([("v5e-4", *case) for case in cases])
    )
    assert alone > 0
    assert two == pytest.approx(2 * alone)
    # of 72 blocks of 512 by 1,024, those behind the window; steps and spans cost beside them
    assert 0.35 < local / alone < 0.5
    # blocks of 512: three of the six below the diagonal
    (forward, _), (backward, _) = row_attention_cycles("v5e", 128)
    hidden = 4 * 3 * 512**2 * (forward + backward) / CHIPS["v5e"].rates.clock_hz
    assert row - local_row == pytest.approx(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", GENERATIONS)
def test_every_generation_compiles_more_shapes(slice_name):
    cases = [(slice_name, *shape, {}) for shape in SHAPES[1:]]
    cases += [(slice_name, *shape, LOCAL) for shape in SHAPES[2:]]
    early = slice_name in EARLY
    long = [0 if early else 2, False]  # one backward kernel, or no kernel
    wide = [2, False]  # a head of 256 is too large to be whole
    found = kernels_of(cases)
    assert [kernel for *kernel, _ in found] == [[2, not early], wide, long, wide, long]


@pytest.mark.parametrize(
    "generation",
    ["v6e", *(pytest.param(g, marks=pytest.mark.slow) for g in ("v4", "v5e", "v5p", "7x"))],
)
def test_disentangled_attention_compiles(generation):
    """In rows of DeBERTa's length and twice that, for what `plan` says it costs."""
    slice_name = next(name for name in GENERATIONS if name.startswith(generation))
    cases = [(slice_name, 1, t, 2, 2, 64, {"distances": True}) for t in (512, 1024)]
    short, long = kernels_of(cases)
    assert short[:1] == long[:1] == [2]
    assert short[-1] * 4 == pytest.approx(long[-1])
