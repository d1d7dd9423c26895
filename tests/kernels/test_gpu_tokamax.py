"""What tokamax is asked for equals the reference, by tokamax's own reference on a CPU; its kernels
in Mosaic are compiled for cards in tests/aot/test_gpu.py."""

import importlib.util
from functools import partial

import pytest

from lmwright.kernels import gpu_tokamax
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import WAYS_TO_SEE, problem, seen_by
from tests.kernels.test_cpu import near
from tests.kernels.test_gpu_attention import both

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs tokamax (cuda13)"
)


@pytest.fixture(scope="module")
def reference():
    """tokamax's attention by XLA, with the same arguments and residuals as its kernels."""
    from tokamax._src.ops.attention import base

    own = gpu_tokamax.library()
    assert own is not None, "this version of tokamax lacks what lmwright uses"
    return gpu_tokamax.Kernels(base.DotProductAttention(), base.DotProductAttentionVjp(), own.mask)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("kind", WAYS_TO_SEE)
def test_intervals(kind, soft_cap, reference):
    q, k, v, ids, g = problem(2, 130, 4, 2, 16)
    seen, reach = seen_by(kind, ids)
    scoring = Scoring(0.37, soft_cap=soft_cap)
    attend = partial(gpu_tokamax.attention, kernels=reference)
    got = both(attend, q, k, v, g, seen, scoring, reach)
    near(got, both(intervals.attention, q, k, v, g, seen, scoring), share=5e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_causal(window, reference):
    """Ends of intervals are not read then."""
    q, k, v, ids, g = problem(2, 130, 4, 2, 16)
    seen, reach = intervals.causal(ids, window), intervals.causal_reach(window)
    assert reach.causal
    scoring = Scoring(0.37, window)
    attend = partial(gpu_tokamax.attention, kernels=reference)
    got = both(attend, q, k, v, g, seen, scoring, reach)
    near(got, both(attention.causal_attention, q, k, v, g, ids, scoring), share=5e-6)
