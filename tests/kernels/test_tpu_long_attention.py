"""The attention kernel of long rows, interpreted on CPU in small blocks, against the reference."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.kernels import tpu_long_attention, tpu_spans
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import problem

WAYS = {"one block a span": (128, 128, 128, 128), "blocks": (128, 128, 256, 512),
        "parts of blocks": (128, 512, 256, 512)}  # fmt: skip


def both(fn, q, k, v, ids, g, **choices):
    def run(q, k, v, g):
        out, back = jax.vjp(lambda *a: fn(*a, ids, Scoring(0.3, **choices)), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v, g)


def check(shape, **choices):
    kernel = partial(tpu_long_attention.causal_attention, interpret=True)
    want = both(attention.causal_attention, *problem(*shape), **choices)
    for a, b in zip(both(kernel, *problem(*shape), **choices), want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_spans_of_packed_rows(way, monkeypatch):
    """An odd number of spans in one order; heads that share a kv head."""
    monkeypatch.setattr(tpu_spans, "SHAPES", (WAYS[way],))
    check((2, 640, 4, 2, 64) if way == "one block a span" else (2, 1024, 4, 2, 64))


@pytest.mark.parametrize(
    "choices", [{"window": 300}, {"window": 1}, {"window": 300, "soft_cap": 2.0}]
)
def test_windows_and_soft_caps(choices, monkeypatch):
    monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 128, 256, 256),))
    check((1, 1280, 2, 1, 96), **choices)


@pytest.mark.parametrize("choices", [{}, {"window": 300}])
def test_rows_in_pieces(choices, monkeypatch):
    """Queries, keys and values of each row as three rows of a third of it; two spans of queries and
    one of keys in each."""
    monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 256, 128, 256),))
    q, k, v, ids, g = problem(2, 768, 4, 2, 32)
    cut = lambda a: a.reshape(6, 256, *a.shape[2:])  # noqa: E731
    kernel = partial(tpu_long_attention.causal_attention, interpret=True)
    whole = both(kernel, q, k, v, ids, g, **choices)
    for a, b in zip(both(kernel, *map(cut, (q, k, v)), ids, cut(g), **choices), whole, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)


def test_rows_mapped_over():
    """As those of many adapters."""
    q, k, v, ids, g = problem(2, 256, 2, 1, 32)
    kernel = partial(tpu_long_attention.causal_attention, interpret=True)
    one = lambda q, k, v, ids, s: kernel(*(a[None] for a in (q, k, v, ids)), s)[0]  # noqa: E731
    one_by_one = jax.vmap(one, in_axes=(0, 0, 0, 0, None))
    got = both(one_by_one, q, k, v, ids, g)
    for a, b in zip(got, both(attention.causal_attention, q, k, v, ids, g), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


RACES = """
import sys
import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from lmwright.kernels import tpu_long_attention, tpu_spans
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import problem

tpu_spans.SHAPES, tpu_spans.BAND, tpu_spans.BAND_SPANS = ((128,) * 4,), 128, (384,)
tokens, reach = int(sys.argv[1]), intervals.Reach(*(int(n) if n else None for n in sys.argv[2:4]))
q, k, v, ids, g = problem(1, tokens, 2, 1, 16)
seen = intervals.both_ways(ids, reach.before) if reach.after != 0 else intervals.causal(ids)

def attend(q, k, v):
    options = pltpu.InterpretParams(detect_races=True)
    return tpu_long_attention.attention(q, k, v, seen, Scoring(0.3), reach, interpret=options)

out, back = jax.vjp(attend, q, k, v)
jax.block_until_ready(back(g))
print("races:", interpreter.races.races_found)
"""


@pytest.mark.parametrize(
    ("tokens", "before", "after"),
    [(384, "", "0"), (384, "", ""), pytest.param(768, "40", "40", marks=pytest.mark.slow)],
)
def test_no_copy_races_with_another(tokens, before, after):
    """In a process of its own: the interpreter keeps threads, which once hung the next test."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RACES, str(tokens), before, after],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "races: False", done.stderr[-3000:]


def test_intervals_are_the_mask_of_the_reference():
    ids, at = problem(2, 256, 1, 1, 16)[3], jnp.arange(256)
    for window in (None, 1, 70):
        start, end = intervals.causal(ids, window)
        seen = (at >= start[..., None]) & (at < end[..., None])
        np.testing.assert_array_equal(seen, attention.causal_mask(ids, window))


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("window", [None, 1, 300])
def test_steps_visit_every_span_that_queries_see_once(by_keys, window):
    """And none that they do not see; in no more steps than the grid has."""
    ids = problem(2, 1280, 1, 1, 16)[3]
    walk = tpu_spans.Walk(tpu_spans.Sizes(1280, 128, 128, 128, 256), by_keys)
    tables = walk.tables(*intervals.causal(ids, window))
    mask = np.array(attention.causal_mask(ids, window))
    for row in range(2):
        met = []
        for pair in range(walk.pairs):
            for number in range(walk.most_steps(intervals.causal_reach(window))):
                step = walk.step(tables, row, pair, number)
                if step.active:
                    met.append((int(step.queries), int(step.keys)))
        blocks = mask[row].reshape(10, 128, 5, 256).any(axis=(1, 3))
        assert sorted(met) == [tuple(pair) for pair in np.argwhere(blocks).tolist()]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("seq_len", [1152, 4096, 4224, 32_768, 131_072])
def test_sizes_divide_the_row_and_fit(seq_len, head_dim, itemsize):
    sizes = tpu_spans.sizes_of(seq_len, head_dim, itemsize)
    assert seq_len % sizes.span_q == sizes.span_q % sizes.block_q == sizes.block_q % 128 == 0
    assert seq_len % sizes.span_k == sizes.span_k % sizes.block_k == sizes.block_k % 128 == 0
    assert sizes.vector_memory(head_dim, itemsize) <= tpu_spans.VECTOR_MEMORY
