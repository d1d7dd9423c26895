"""Attention over rows that are cut over devices, against the reference on whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from lmwright.core.sharding import AXES, device_kind, platform
from lmwright.kernels import (
    all_to_all_attention,
    online_softmax,
    ring_attention,
    tpu_attention,
    tpu_window_attention,
    window_attention,
)
from lmwright.nn import attention
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import problem


def with_gradients(fn, ids, q, k, v, g, **masks):
    out, back = jax.vjp(lambda *a: fn(*a, ids, Scoring(0.3, **masks)), q, k, v)
    return out, *back(g)


def mesh_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compare(fn, mesh, shape, **masks):
    q, k, v, ids, g = problem(*shape)
    run = lambda fn: jax.jit(partial(with_gradients, fn, **masks))(ids, q, k, v, g)  # noqa: E731
    want = run(attention.causal_attention)
    with jax.set_mesh(mesh):
        got = run(fn)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("sizes", "shape", "queries", "masks"),
    [
        ({"context": 8}, (2, 48, 6, 2, 5), 512, {}),
        ({"context": 3}, (2, 30, 6, 2, 5), 512, {"window": 4, "soft_cap": 0.9}),
        # in pieces of two
        ({"context": 2, "fsdp": 2, "tensor": 2}, (4, 32, 4, 2, 6), 3, {}),
        ({"context": 2, "fsdp": 2, "tensor": 2}, (4, 32, 4, 2, 6), 3, {"window": 19}),
    ],
)
def test_ring_equals_the_reference(sizes, shape, queries, masks, monkeypatch):
    monkeypatch.setattr(online_softmax, "QUERIES", queries)
    compare(ring_attention.causal_attention, mesh_of(**sizes), shape, **masks)


@pytest.mark.parametrize(
    ("sizes", "shape", "queries", "masks"),
    [
        ({"context": 8}, (2, 48, 6, 2, 5), 512, {"window": 4, "soft_cap": 0.9}),  # of one neighbor
        ({"context": 8}, (2, 48, 6, 2, 5), 512, {"window": 7}),  # all of its tokens
        ({"context": 8}, (2, 48, 6, 2, 5), 4, {"window": 24}),  # of four; in pieces of three
        ({"context": 8}, (2, 48, 6, 2, 5), 512, {"window": 1}),
        ({"context": 8}, (2, 48, 6, 2, 5), 512, {"window": 25}),  # around the ring
        ({"context": 2, "fsdp": 2, "tensor": 2}, (4, 32, 4, 2, 6), 3, {"window": 9}),
    ],
)
def test_windows_take_what_is_before_them(sizes, shape, queries, masks, monkeypatch):
    monkeypatch.setattr(online_softmax, "QUERIES", queries)
    fn = partial(window_attention.causal_attention, window_attention.attend)
    compare(fn, mesh_of(**sizes), shape, **masks)


@pytest.mark.parametrize("masks", [{"window": 100, "soft_cap": 2.0}, {"window": 257}])
def test_windows_over_devices_by_the_kernel_of_tpus(masks):
    near = partial(tpu_window_attention.attend, interpret=True)
    fn = partial(window_attention.causal_attention, near)
    compare(fn, mesh_of(context=4, tensor=2), (1, 1024, 4, 2, 64), **masks)


@pytest.mark.parametrize("kernel", ["reference", "splash"])
def test_all_to_all_equals_the_reference(kernel):
    splash = partial(tpu_attention.causal_attention, interpret=True)
    inner = splash if kernel == "splash" else attention.causal_attention
    fn = partial(all_to_all_attention.causal_attention, inner)
    mesh, shape = mesh_of(context=2, fsdp=2, tensor=2), (4, 256, 8, 4, 64)
    compare(fn, mesh, shape)
    compare(fn, mesh, shape, window=100, soft_cap=2.0)


def test_all_to_all_keeps_the_kind_of_device():
    """Kernels are chosen by it, also where each device computes by itself."""
    kinds = []

    def inner(*args, **options):
        mesh = jax.sharding.get_abstract_mesh()
        kinds.append((mesh.empty, platform(), device_kind()))
        return attention.causal_attention(*args, **options)

    fn = partial(all_to_all_attention.causal_attention, inner)
    compare(fn, mesh_of(context=2), (1, 32, 4, 2, 8))
    device = jax.devices()[0]
    assert set(kinds) == {(True, device.platform, device.device_kind)}


@pytest.mark.parametrize(
    ("sizes", "heads", "masks"),
    [
        ({"context": 4}, (8, 2), {"window": 11, "soft_cap": 0.9}),
        ({"context": 8}, (8, 2), {}),
        ({"context": 8}, (8, 1), {"window": 5}),
        ({"context": 4, "tensor": 2}, (16, 2), {"soft_cap": 0.9}),
        ({"context": 4}, (12, 6), {"window": 11}),  # neither number divides the other
    ],
)
def test_all_to_all_with_fewer_kv_heads_than_devices(sizes, heads, masks):
    fn = partial(all_to_all_attention.causal_attention, attention.causal_attention)
    compare(fn, mesh_of(**sizes), (2, 32, *heads, 6), **masks)


@pytest.mark.parametrize("ways", [2, pytest.param(3, marks=pytest.mark.slow), 8])
def test_chunks_go_where_the_work_is_even(ways):
    """Device d holds chunks d and 2 n - 1 - d; then they return."""
    row = jnp.arange(2 * ways)[None]  # a chunk of one token each
    mesh = mesh_of(context=ways)
    run = partial(jax.shard_map, mesh=mesh, check_vma=False)
    spec = jax.sharding.PartitionSpec
    split = run(partial(ring_attention._striped, ways), in_specs=spec(None, "context"),
                out_specs=spec(None, None, "context"))  # fmt: skip
    join = run(partial(ring_attention._unstriped, ways), in_specs=spec(None, None, "context"),
               out_specs=spec(None, "context"))  # fmt: skip
    held = split(row)[:, 0]
    np.testing.assert_array_equal(held[0], np.arange(ways))
    np.testing.assert_array_equal(held[1], 2 * ways - 1 - np.arange(ways))
    np.testing.assert_array_equal(join(split(row)), row)


def test_memory_is_linear_in_the_tokens(monkeypatch):
    monkeypatch.setattr(online_softmax, "QUERIES", 32)

    def temporaries(t):
        q, k, v, ids, g = problem(1, t, 4, 2, 8)
        with jax.set_mesh(mesh_of(context=4)):
            fn = jax.jit(partial(with_gradients, ring_attention.causal_attention))
            compiled = fn.lower(ids, q, k, v, g).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.3 * temporaries(1024)
