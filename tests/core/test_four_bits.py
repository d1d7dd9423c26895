"""Both ways to widen integers of four bits give the same numbers, exactly."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.four_bits import _by_blocks, _by_product
from lmwright.core.leaves import Int4

SHAPES = [
    ((3, 96, 40), (3, 3, 40), 1, 1),  # experts
    ((2, 5, 64, 24), (2, 5, 2, 24), 2, 1),  # a layer's output projection
    ((7, 64, 3, 8), (7, 4, 3, 8), 1, 2),  # heads
    ((512 * 32, 4), (512, 4), 1, 1),  # more blocks than are repeated together
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize(("shape", "blocks", "inputs", "outputs"), SHAPES)
def test_products_repeat_scales_exactly(shape, blocks, inputs, outputs, mxfp4, dtype):
    draw = np.random.default_rng(0)
    w = Int4(
        jnp.asarray(draw.integers(-7, 8, shape), jnp.int4),
        jnp.asarray(draw.normal(size=blocks), jnp.bfloat16),
        inputs, outputs, mxfp4,
    )  # fmt: skip
    found, want = (way(w.values, w.scale, w, dtype) for way in (_by_product, _by_blocks))
    assert found.dtype == want.dtype == dtype
    np.testing.assert_array_equal(found.astype("f4"), want.astype("f4"))
    levels = np.array([0, 1, 2, 3, 4, 6, 8, 12]) if mxfp4 else np.arange(8)
    number, axis = np.asarray(w.values, int), len(shape) - outputs - 1
    scale = np.repeat(np.asarray(w.scale, "f4"), shape[axis] // blocks[axis], axis)
    exact = jnp.asarray(np.sign(number) * levels[np.abs(number)] * scale, dtype)
    np.testing.assert_array_equal(want.astype("f4"), exact.astype("f4"))
