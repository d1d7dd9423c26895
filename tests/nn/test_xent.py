"""Cross-entropy: pieces that differ by platform, and the soft cap, against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.nn import soft_cap, xent
from tests.kernels.test_tpu_intervals import mesh_of

KEY = jax.random.key(3)


@pytest.mark.parametrize("axis", [0, -1])
def test_the_targets_and_largest_logits_are_the_same_on_every_platform(axis):
    logits = jax.random.normal(KEY, (2, 5, 7))
    logits = logits.at[0, 0].set(1.0)  # all equal
    logits = logits.at[0, 1, 2].set(-jnp.inf)
    logits = logits.at[1, 1, 3].set(jnp.nan)
    targets = jnp.array([[3, 2, 0, 6, 1], [0, 1, 6, 4, 5]])
    targets = targets.at[1, 0].set(jnp.argmax(logits[1, 0]))
    wide = jnp.moveaxis(logits, -1, axis)
    chosen, top = xent._in_one_pass(axis, wide, targets)
    np.testing.assert_array_equal(chosen, np.take_along_axis(logits, targets[..., None], 2)[..., 0])
    np.testing.assert_array_equal(top, np.max(logits, axis=-1))
    for mine, other in zip((chosen, top), xent._gathered(axis, wide, targets), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("devices", [1, 8])
def test_log_z_in_one_pass(axis, devices):
    """As GPUs compute it, of a vocabulary on one device and cut over several."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 1000)) * 20 - 200
    targets = rng.integers(0, 1000, (2, 3))
    top = logits.max(-1)
    log_z = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    mesh = jax.make_mesh((devices,), ("tensor",), devices=jax.devices()[:devices])
    place = NamedSharding(mesh, PartitionSpec("tensor") if axis == 0 else PartitionSpec())
    given = jax.device_put(jnp.float32(np.moveaxis(logits, -1, axis)), place)
    got = jax.jit(xent._in_pairs, static_argnums=0)(axis, given, targets)
    for ours, exact in zip(got, (chosen, top, log_z), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_z_in_one_pass_tells_what_is_not_finite(bad):
    logits = jnp.zeros((1, 100)).at[0, 40].set(bad)
    assert not jnp.isfinite(xent._in_pairs(-1, logits, jnp.array([3]))[2])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_soft_cap_has_the_gradient_of_its_formula(precision):
    logits = (40 * jax.random.normal(KEY, (3, 50))).astype(precision)
    pull = jax.random.normal(jax.random.key(1), (3, 50)).astype(precision)
    plain = lambda x: 30.0 * jnp.tanh(x / 30.0)  # noqa: E731
    value, back = jax.vjp(lambda x: soft_cap.soft_capped(x, 30.0), logits)
    wanted, wanted_back = jax.vjp(plain, logits.astype(jnp.float32))
    share = 1e-6 if precision == "float32" else 2e-2
    np.testing.assert_allclose(value.astype(jnp.float32), wanted, rtol=share, atol=share)
    (got,), (there,) = back(pull), wanted_back(pull.astype(jnp.float32))
    np.testing.assert_allclose(got.astype(jnp.float32), there, rtol=share, atol=2 * share)


def test_a_device_takes_whole_chunks_of_its_piece_of_a_row():
    """Otherwise the head is gathered for each piece of a chunk."""
    row = jnp.zeros((2, 60))
    with jax.set_mesh(mesh_of(context=4, data=2)):
        assert xent.in_chunks(8, row)[0] == 4 * 8
        chunk, (filled,) = xent.in_chunks(100, row)
        assert (chunk, filled.shape) == (60, (2, 60))
    assert xent.in_chunks(8, row)[0] == 8
