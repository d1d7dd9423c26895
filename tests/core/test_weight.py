"""The weight gradient of several devices, summed by all-to-all, against the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmwright.core import weight
from lmwright.core.sharding import AXES


def mesh_of(**sizes):
    devices = np.array(jax.devices()).reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def gradient(mesh, eqn, x, g):
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda x, g: weight.scattered_gradient(eqn, x, g, 8))
        compiled = run.lower(jax.device_put(x, place), jax.device_put(g, place)).compile()
        return compiled(jax.device_put(x, place), jax.device_put(g, place)), compiled.as_text()


@pytest.mark.parametrize(
    "eqn, x_shape, g_shape, plain",
    [
        ("btd,df->btf", (8, 5, 16), (8, 5, 7), "btd,btf->df"),
        ("btd,dnh->btnh", (16, 5, 8), (16, 5, 3, 6), "btd,btnh->dnh"),
        ("btnh,nhd->btd", (8, 5, 3, 6), (8, 5, 24), "btnh,btd->nhd"),
        ("btd,vd->btv", (8, 5, 16), (8, 5, 11), "btd,btv->vd"),
    ],
)
def test_equals_the_plain_product(eqn, x_shape, g_shape, plain):
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, g_shape))
    got, hlo = gradient(mesh_of(fsdp=8), eqn, x, g)
    assert "all-to-all" in hlo and "all-reduce" not in hlo
    np.testing.assert_allclose(got, np.einsum(plain, x, g), rtol=1e-5, atol=1e-5)


def test_sums_of_the_devices_are_float32():
    x = np.ones((8, 1, 8), np.float32)
    g = np.array([256, 1, 1, 1, 1, 1, 1, 1], np.float32).reshape(8, 1, 1)  # sums 263, no bfloat16
    x, g = jnp.asarray(x, jnp.bfloat16), jnp.asarray(g, jnp.bfloat16)
    got, _ = gradient(mesh_of(fsdp=8), "btd,df->btf", x, g)
    np.testing.assert_array_equal(got, 263)


@pytest.mark.parametrize(
    "device_kind, sizes, yes",
    [
        ("TPU v4", {"fsdp": 16}, True),
        ("TPU v5p", {"fsdp": 4, "tensor": 2}, True),
        ("TPU v4", {"fsdp": 32}, False),
        ("TPU v4", {"fsdp": 1, "tensor": 8}, False),
        ("TPU v4", {"fsdp": 4, "data": 2}, False),
        ("TPU v4", {"fsdp": 4, "expert": 2}, False),
        ("TPU v4", {"fsdp": 4, "context": 2}, False),
        ("TPU v5 lite", {"fsdp": 8}, False),
        ("cpu", {"fsdp": 8}, False),
    ],
)
def test_where_it_is_used(device_kind, sizes, yes):
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    assert weight.scatters(device_kind, sizes, rows) == yes


def test_a_mesh_says_which_platform_it_is():
    """No branch of another platform is traced, and the compiler has nothing to choose."""
    x, w = jnp.ones((8, 5, 16)), jnp.ones((16, 8))
    product = lambda x, w: weight.product("btd,df->btf", x, w)  # noqa: E731
    assert "platform_index" in str(jax.make_jaxpr(product)(x, w))
    with jax.set_mesh(mesh_of(fsdp=8)):
        known = str(jax.make_jaxpr(product)(x, w))
    assert "dot_general" in known and "platform_index" not in known and "cond" not in known
