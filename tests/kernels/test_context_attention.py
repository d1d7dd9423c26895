"""Attention over rows that are cut over devices, against the reference on whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from podsmith.core.sharding import AXES
from podsmith.kernels import all_to_all_attention, ring_attention, tpu_attention
from podsmith.nn import attention


def problem(b, t, n, k, h, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (b, t)), axis=1), jnp.int32)
    ids = ids.at[0, -t // 5 :].set(0)  # padding
    return normal(b, t, n, h), normal(b, t, k, h), normal(b, t, k, h), ids, normal(b, t, n, h)


def with_gradients(fn, ids, q, k, v, g):
    out, back = jax.vjp(lambda *a: fn(*a, ids, 0.3), q, k, v)
    return out, *back(g)


def mesh_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compare(fn, mesh, shape):
    q, k, v, ids, g = problem(*shape)
    want = jax.jit(partial(with_gradients, attention.causal_attention))(ids, q, k, v, g)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(with_gradients, fn))(ids, q, k, v, g)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("sizes", "shape", "queries"),
    [
        ({"context": 8}, (2, 48, 6, 2, 5), 512),
        ({"context": 3}, (2, 27, 6, 2, 5), 512),  # an odd share of each device
        ({"context": 2, "fsdp": 2, "tensor": 2}, (4, 32, 4, 2, 6), 3),  # in pieces of two
    ],
)
def test_ring_equals_the_reference(sizes, shape, queries, monkeypatch):
    monkeypatch.setattr(ring_attention, "QUERIES", queries)
    compare(ring_attention.causal_attention, mesh_of(**sizes), shape)


@pytest.mark.parametrize("kernel", ["reference", "splash"])
def test_all_to_all_equals_the_reference(kernel):
    splash = partial(tpu_attention.causal_attention, interpret=True)
    inner = splash if kernel == "splash" else attention.causal_attention
    fn = partial(all_to_all_attention.causal_attention, inner)
    compare(fn, mesh_of(context=2, fsdp=2, tensor=2), (4, 256, 8, 4, 64))


def test_every_device_has_the_same_work():
    """Pairs of chunks that are not above the diagonal, by device and step."""
    ways = 6
    held = [[int(c) for c in ring_attention._chunks(ways, jnp.int32(d), 2)] for d in range(ways)]
    assert sorted(sum(held, [])) == list(range(2 * ways))
    for step in range(ways):
        pairs = [
            sum(mine >= theirs for mine in held[d] for theirs in held[(d - step) % ways])
            for d in range(ways)
        ]
        assert set(pairs) == {3 if step == 0 else 2}


def test_memory_is_linear_in_the_tokens(monkeypatch):
    monkeypatch.setattr(ring_attention, "QUERIES", 32)

    def temporaries(t):
        q, k, v, ids, g = problem(1, t, 4, 2, 8)
        with jax.set_mesh(mesh_of(context=4)):
            fn = jax.jit(partial(with_gradients, ring_attention.causal_attention))
            compiled = fn.lower(ids, q, k, v, g).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.3 * temporaries(1024)
