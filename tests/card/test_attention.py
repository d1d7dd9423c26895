"""Each kernel of attention on a card, compiled: result and gradients of bfloat16 beside the
reference in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.kernels import gpu_attention, gpu_blocks, gpu_chunks, gpu_cudnn, gpu_tokamax
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import WAYS_TO_SEE, problem, seen_by

pytestmark = pytest.mark.slow

KERNELS = {
    "tokamax": gpu_tokamax.attention,
    "kernels": gpu_blocks.attention,
    "chunks": gpu_chunks.attention,
}
NEAR = 8e-3  # of the norm; each rounding to bfloat16 is 2e-3


def both(attend, q, k, v, g, *rest):
    """Result and gradients."""

    def run(q, k, v, g, *rest):
        out, back = jax.vjp(lambda *a: attend(*a, *rest), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v, g, *rest)


def compare(attend, arrays, seen, scoring):
    """Asserts that a kernel's results are the reference's of the same bfloat16 numbers."""
    narrow = [a.astype(jnp.bfloat16) for a in arrays]
    got = both(lambda *a: attend(*a, scoring), *narrow, seen)
    wide = [a.astype(jnp.float32) for a in narrow]
    with jax.default_matmul_precision("highest"):
        wanted = both(lambda *a: intervals.attention(*a, scoring), *wide, seen)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < NEAR, f"{name}: {error:.1e}"


def skip_unless_it_takes(name, q, k, scoring, card):
    """tokamax is optional, and for Hopper and Blackwell."""
    if name == "tokamax" and not gpu_tokamax.fits(
        jnp.zeros(q.shape, jnp.bfloat16), k, scoring, card.device_kind
    ):
        pytest.skip("tokamax is not there, or does not take it on this card")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("length", "heads", "head_dim", "masks"),
    [
        (512, (9, 3), 64, {}),
        (512, (4, 4), 128, {"window": 100}),
        (320, (8, 1), 64, {"soft_cap": 20.0}),
        (256, (4, 2), 256, {"window": 70, "soft_cap": 20.0}),
        (192, (4, 2), 80, {}),
        (1024, (2, 2), 16, {}),
    ],
)
def test_causal(card, name, length, heads, head_dim, masks):
    """Rows of several documents, with padding."""
    q, k, v, ids, g = problem(2, length, *heads, head_dim)
    scoring = Scoring(head_dim**-0.5, **masks)
    skip_unless_it_takes(name, q, k, scoring, card)
    seen, reach = intervals.causal(ids, scoring.window), intervals.causal_reach(scoring.window)
    attend = lambda q, k, v, seen, scoring: KERNELS[name](q, k, v, seen, scoring, reach)  # noqa: E731
    compare(attend, (q, k, v, g), seen, scoring._replace(window=None))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", WAYS_TO_SEE)
def test_intervals(card, name, kind):
    q, k, v, ids, g = problem(2, 256, 6, 2, 64)
    seen, reach = seen_by(kind, ids)
    scoring = Scoring(0.125)
    skip_unless_it_takes(name, q, k, scoring, card)
    attend = lambda q, k, v, seen, scoring: KERNELS[name](q, k, v, seen, scoring, reach)  # noqa: E731
    compare(attend, (q, k, v, g), seen, scoring)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (300, 128)])
def test_cudnn(length, head_dim, window):
    """Rows of one document."""
    q, k, v, ids, g = problem(2, length, 6, 2, head_dim)
    scoring, reach = Scoring(head_dim**-0.5), intervals.causal_reach(window)
    assert gpu_cudnn.fits(q.astype(jnp.bfloat16), scoring, reach)
    seen = intervals.causal(jnp.ones_like(ids), window)
    attend = lambda q, k, v, seen, scoring: gpu_cudnn.attention(q, k, v, scoring, reach)  # noqa: E731
    compare(attend, (q, k, v, g), seen, scoring)


@pytest.mark.parametrize("one_document", [False, True])
def test_what_is_taken(one_document):
    """What training takes on this card compiles and runs, whatever it is."""
    q, k, v, ids, g = problem(2, 512, 6, 2, 64)
    ids = jnp.ones_like(ids) if one_document else ids
    attend = partial(gpu_attention.causal_attention, one_document=one_document)
    seen = intervals.causal(ids)
    compare(lambda q, k, v, seen, scoring: attend(q, k, v, ids, scoring), (q, k, v, g), seen,
            Scoring(0.125))  # fmt: skip
