"""The attention kernels of TPUs for intervals of keys, interpreted on CPU, against the plain
reference: values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from lmwright.core.compute import Compute
from lmwright.core.sharding import AXES
from lmwright.kernels import select, tpu_interval_attention, tpu_row_attention, tpu_spans
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach
from tests.kernels.attention_problem import problem
from tests.kernels.interval_problem import EXACT, KINDS, check, odd, odd_within, with_gradients


def kernel(reach, **options):
    attend = partial(tpu_interval_attention.attention, reach=reach, interpret=True, **options)
    return lambda q, k, v, seen, scoring: attend(q, k, v, seen, scoring)


def take_long(monkeypatch, *shape):
    monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
    monkeypatch.setattr(tpu_spans, "SHAPES", (shape,))


SHAPES = {"whole rows": (1, 256, 4, 2, 32), "whole rows in blocks": (1, 384, 4, 2, 32),
          "long rows": (2, 512, 4, 2, 32), "odd long rows": (2, 512, 4, 2, 32)}  # fmt: skip


@pytest.fixture(params=SHAPES)
def scheme(request, monkeypatch):
    if request.param == "whole rows in blocks":
        monkeypatch.setattr(tpu_row_attention, "BLOCK", 128)
    if request.param == "long rows":
        take_long(monkeypatch, 128, 128, 128, 256)
    if request.param == "odd long rows":  # spans of keys are the smaller ones
        take_long(monkeypatch, 128, 128, 256, 128)
    return request.param


OFTEN = {"whole rows": KINDS, "whole rows in blocks": ["causal window", "near", "odd"],
         "long rows": ["near", "odd"], "odd long rows": ["odd"]}  # fmt: skip
"""Those that differ in what is skipped or masked."""


@pytest.mark.parametrize(
    "scheme, kind",
    [
        pytest.param(scheme, kind, marks=[] if kind in often else pytest.mark.slow)
        for scheme, often in OFTEN.items()
        for kind in KINDS
    ],
    indirect=["scheme"],
)
def test_equal_to_the_reference(kind, scheme):
    """Heads that share a kv head, a soft cap, segments and padding."""
    q, k, v, ids, g = problem(*SHAPES[scheme])
    make, reach = KINDS[kind]
    check(kernel(reach), make(ids), (q, k, v, g))


@pytest.mark.parametrize("kind", ["both ways", "near", "odd"])
def test_an_odd_number_of_spans(kind, monkeypatch):
    take_long(monkeypatch, 128, 128, 128, 128)
    q, k, v, ids, g = problem(1, 640, 2, 1, 16)
    make, reach = KINDS[kind]
    check(kernel(reach), make(ids), (q, k, v, g), scoring=Scoring(0.4))


@pytest.mark.parametrize("kind", [pytest.param("near", marks=pytest.mark.slow), "odd, near"])
def test_bands_of_long_rows(kind, monkeypatch):
    """Queries near the edge of a span of keys meet two; parts of 128 keys."""
    take_long(monkeypatch, 128, 128, 128, 128)
    monkeypatch.setattr(tpu_spans, "BAND", 128)
    monkeypatch.setattr(tpu_spans, "BAND_SPANS", (640,))
    q, k, v, ids, g = problem(2, 1280, 2, 1, 16)
    make, reach = KINDS.get(kind, (lambda ids: odd_within(ids, 60, 130), Reach(60, 130)))
    assert tpu_spans.sizes_of(1280, 16, 4, reach).band
    check(kernel(reach), make(ids), (q, k, v, g))


@pytest.mark.parametrize(
    "kind", [k if k == "near" else pytest.param(k, marks=pytest.mark.slow) for k in EXACT]
)
def test_splash_for_early_chips(kind):
    q, k, v, ids, g = problem(2, 256, 4, 2, 64)
    make, reach = KINDS[kind]
    check(kernel(reach, early=True), make(ids), (q, k, v, g))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("shape", [(2, 100, 2, 1, 16), (1, 128, 2, 1, 20)])
def test_what_no_kernel_of_ours_takes(shape, early):
    """Rows of no multiple of 128, heads of no multiple of 16."""
    q, k, v, ids, g = problem(*shape)
    for kind in ("near", "blocks"):
        make, reach = KINDS[kind]
        check(kernel(reach, early=early), make(ids), (q, k, v, g))


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 70])
def test_causal_intervals_are_causal_attention(window, scheme):
    q, k, v, ids, g = problem(1, 384, 2, 2, 32)
    seen, reach = intervals.causal(ids, window), intervals.causal_reach(window)
    scoring = Scoring(0.3, window)
    got = with_gradients(kernel(reach), seen, q, k, v, g, scoring)
    want = with_gradients(attention.causal_attention, ids, q, k, v, g, scoring)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


@pytest.mark.parametrize("long", [False, True])
def test_rows_mapped_over(long, monkeypatch):
    """As those of many adapters."""
    if long:
        take_long(monkeypatch, 128, 128, 128, 128)
    q, k, v, ids, g = problem(2, 256, 2, 1, 16)
    attend = kernel(Reach())

    def one_by_one(q, k, v, seen, scoring):
        def one(*row):
            return attend(*jax.tree.map(lambda a: a[None], row), scoring)[0]

        return jax.vmap(one)(q, k, v, seen)

    check(one_by_one, odd(ids), (q, k, v, g))


@settings(max_examples=4)
@given(data=st.data(), long=st.booleans())
def test_any_intervals_within_any_reach(data, long):
    """Drawn by blocks of 32 queries, so that whole spans may be empty."""
    t, size = 256, 32
    sides = st.one_of(st.none(), st.integers(0, t))
    reach = Reach(data.draw(sides), data.draw(sides))
    drawn = data.draw(st.lists(st.tuples(*[st.integers(0, t)] * 2), min_size=8, max_size=8))
    sides = jnp.array(drawn, jnp.int32).T
    start, end = (jnp.repeat(side, size)[None] for side in sides)
    at = jnp.arange(t, dtype=jnp.int32)
    start = start if reach.before is None else jnp.maximum(start, at - reach.before)
    end = end if reach.after is None else jnp.minimum(end, at + 1 + reach.after)
    q, k, v, _, g = problem(1, t, 2, 1, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_row_attention, "BLOCK", 128)
        if long:
            take_long(patch, 128, 128, 128, 128)
        check(kernel(reach), Interval(start, end), (q, k, v, g))


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "odd"])
def test_steps_visit_every_span_that_queries_see_once(by_keys, kind):
    """And none that they do not see, but those of empty queries; in no more steps than the grid
    has; every span of the outer side, and of queries, whose gradient must be written."""
    ids = problem(2, 1280, 1, 1, 16)[3]
    make, reach = KINDS[kind]
    seen = make(ids)
    walk = tpu_spans.Walk(tpu_spans.Sizes(1280, 128, 128, 128, 256), by_keys)
    tables = walk.tables(*intervals.in_place(seen))
    for row, mask in enumerate(np.array(seen.mask(1280))):
        met = []
        for pair in range(walk.pairs):
            for number in range(walk.most_steps(reach)):
                step = walk.step(tables, row, pair, number)
                if step.active:
                    met.append((int(step.queries), int(step.keys)))
        blocks = mask.reshape(10, 128, 5, 256).any(axis=(1, 3))
        wanted = {tuple(pair) for pair in np.argwhere(blocks).tolist()}
        assert len(met) == len(set(met)) and wanted <= set(met)
        assert {queries for queries, _ in met} == set(range(10))
        assert {keys for _, keys in met} == set(range(5))
        if kind != "none at padding":
            assert wanted == set(met)


def mesh_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize("kind", ["near", "blocks", "odd"])
def test_equal_on_a_mesh(kind):
    """Each device attends within its own rows and heads."""
    q, k, v, ids, g = problem(4, 128, 4, 2, 16)
    make, reach = KINDS[kind]
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        check(kernel(reach), make(ids), (q, k, v, g))


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["near", "odd"])
def test_every_platform_attends_to_intervals(kernels, kind):
    q, k, v, ids, g = problem(2, 130, 4, 2, 6)
    make, reach = KINDS[kind]
    attend = select.attend(Compute(kernels=kernels))
    check(lambda *a: attend(*a, reach), make(ids), (q, k, v, g))


def test_platforms_have_their_kernels():
    assert select.attend(Compute(kernels="tpu")) is tpu_interval_attention.attention
    early = select.attend(Compute(kernels="early tpu"))
    assert early.func is tpu_interval_attention.attention and early.keywords == {"early": True}


@pytest.mark.parametrize("how", ["ring", "all_to_all"])
@pytest.mark.parametrize("sizes", [{"context": 8}, {"context": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize(
    "kind",
    [
        k if k in ("near", "blocks", "odd") else pytest.param(k, marks=pytest.mark.slow)
        for k in KINDS
    ],
)
def test_rows_cut_over_devices(kind, sizes, how):
    q, k, v, ids, g = problem(2, 320, 8, 4, 6)
    make, reach = KINDS[kind]
    with jax.set_mesh(mesh_of(**sizes)):
        attend = select.attend(Compute(context_attention=how))
        check(lambda *a: attend(*a, reach), make(ids), (q, k, v, g))


def test_a_ring_visits_the_devices_in_reach():
    """Of rows of 320 tokens over eight devices."""
    visited = {
        kind: select.KERNELS["ring of intervals"].__globals__["_Ring"].of(reach, 8, 40).count
        for kind, (_, reach) in KINDS.items()
    }
    assert visited["near"] == 3 and visited["itself"] == 1
    assert visited["both ways"] == visited["odd"] == visited["far"] == 8
