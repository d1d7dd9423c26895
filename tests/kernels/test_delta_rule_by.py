"""The gated delta rule of rows that are cut over devices equals that of whole rows."""

from functools import partial

import jax
import numpy as np
import pytest

from lmwright.kernels import tpu_delta_rule
from lmwright.kernels.delta_rule_by import delta_rule
from tests.kernels.test_tpu_delta_rule import assert_near, chunks, problem, result, segment_ids
from tests.kernels.test_tpu_intervals import mesh_of

PIECES = {"context": 4, "data": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("axes", "times", "kernels"),
    [
        (PIECES, 2, "cpu"),
        pytest.param({"context": 2, "tensor": 2, "fsdp": 2}, 1, "cpu", marks=SLOW),
        pytest.param({"context": 2, "tensor": 4}, 2, "cpu", marks=SLOW),
        pytest.param({"context": 2, "data": 2}, 1, "tpu", marks=SLOW),
    ],
)
@pytest.mark.parametrize("ids", [segment_ids(), np.ones((2, 128), np.int32)], ids=["many", "one"])
def test_equal_to_whole_rows(axes, times, kernels, ids):
    """Documents that begin and end on all devices, one that is on several, and padding."""
    arrays, weight = problem(rows=2, times=times)
    size = 64 if kernels == "tpu" else 16
    want = result(partial(chunks, size=size), arrays, ids, weight)
    rule = lambda *a: delta_rule(*a, size, kernels=kernels, interpret=True)  # noqa: E731
    with jax.set_mesh(mesh_of(**axes)):
        if kernels == "tpu":
            assert tpu_delta_rule.FORWARD in str(jax.make_jaxpr(rule)(*arrays, ids))
        assert_near(result(rule, arrays, ids, weight), want)


def test_nothing_of_a_document_reaches_another_device():
    """A document that ends on the first device changes no bit of those that begin on others."""
    (q, k, v, b, g), _ = problem(rows=2)
    ids, v = segment_ids(), v.copy()
    ids[1] = ids[0]
    run = jax.jit(lambda v: delta_rule(q, k, v, b, g, ids, 16, kernels="cpu"))
    with jax.set_mesh(mesh_of(**PIECES)):
        before = np.asarray(run(v))
        v[:, :45] *= -50
        after = np.asarray(run(v))
    np.testing.assert_array_equal(before[:, 45:], after[:, 45:])
    assert np.abs(before[:, :45] - after[:, :45]).max() > 1
