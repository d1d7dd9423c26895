"""GPTQ equals its derivation: after each input is rounded, the others are solved for anew by least
squares, in float64, without any of the algorithm's factors."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.quantize.gptq import BLOCK, DAMPING, TRIED, Rounder, prepared
from lmwright.quantize.grids import BLOCKS, RULES
from lmwright.quantize.superblocks import KINDS

LEVELS = {
    "int4": (-8, 7), "int8": (-128, 127), "q4_0": (-8, 7), "iq4_nl": (-127, 113),
    "q4_k": (0, 15), "q6_k": (-32, 31),
}  # fmt: skip


def gptq(w, moments, grid, group):
    return Rounder("gptq", group)(w, moments, grid)


def nearest(w, moments, grid, group):
    return Rounder("nearest", group)(w, moments, grid)


def problem(inputs=64, outputs=7, tokens=300, seed=0):
    """A matrix and tokens whose inputs depend on each other, of very different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, inputs)) @ rng.standard_normal((inputs, inputs))
    x = mixed * np.exp(rng.standard_normal(inputs))
    return rng.standard_normal((inputs, outputs)), x


def by_least_squares(w, moments, scale, offset, whole, low, high):
    """Codes of w [I, O]: each input in the order of its moment; the rest is solved for."""
    moments = moments + DAMPING * np.diag(moments).mean() * np.eye(len(w))
    order, codes = np.argsort(-np.diag(moments), kind="stable"), np.zeros_like(w)
    now = w.copy()
    for place, i in enumerate(order):
        codes[i] = np.clip(whole((now[i] + offset[i]) / scale[i]), low, high)
        done, free = order[: place + 1], order[place + 1 :]
        if len(free):
            left = w[done] - (codes * scale - offset)[done]  # what the others make up for
            rest = np.linalg.solve(moments[np.ix_(free, free)], moments[np.ix_(free, done)] @ left)
            now[free] = w[free] + rest
    return codes


@pytest.mark.parametrize(
    "grid, group, inputs",
    [
        ("int4", 16, 64), ("int8", 0, 64), ("q4_0", 32, 64), ("iq4_nl", 32, 64), ("int4", 64, 64),
        ("int4", 16, BLOCK + 48),  # a block, and a part of one
        ("q4_k", 32, 256), ("q6_k", 16, 256),
    ],
)  # fmt: skip
def test_codes_are_those_of_the_derivation(grid, group, inputs):
    w, x = problem(inputs, tokens=max(300, 4 * inputs))
    moments = x.T @ x
    found = gptq(jnp.asarray(w, jnp.float32), jnp.asarray(moments, jnp.float32), grid, group)
    scale = np.repeat(np.asarray(found.scale, np.float64), group or inputs, axis=0)
    kvalues = pytest.importorskip("gguf").quants.IQ4_NL.kvalues
    whole = {
        "q4_0": lambda a: np.trunc(a + 8.5) - 8,
        "iq4_nl": lambda a: np.take(kvalues, np.abs(a[..., None] - kvalues).argmin(-1)),
    }.get(grid, np.round)
    offset = np.zeros_like(w)
    if found.offset is not None:
        offset = np.repeat(np.asarray(found.offset, np.float64), group, axis=0)
    wanted = by_least_squares(w, moments, scale, offset, whole, *LEVELS[grid])
    same = np.mean(np.asarray(found.codes) == wanted)
    assert same > 0.99, same  # float32 turns one that lies halfway now and then
    error = np.linalg.norm(x @ (w - np.asarray(found.codes) * scale + offset)) ** 2
    np.testing.assert_allclose(found.error, error / np.linalg.norm(x @ w) ** 2, rtol=1e-3)


@pytest.mark.parametrize("grid, group", [("int4", 16), ("int8", 0), ("q4_0", 32), ("iq4_nl", 32)])
def test_results_are_nearer_than_those_of_the_nearest_integers(grid, group):
    for seed in range(3):
        w, x = problem(seed=seed)
        given = jnp.asarray(w, jnp.float32), jnp.asarray(x.T @ x, jnp.float32), grid, group
        assert gptq(*given).error < 0.6 * nearest(*given).error


def test_the_nearest_are_those_of_the_grids_own_rule():
    w, x = problem()
    found = nearest(jnp.asarray(w, jnp.float32), jnp.asarray(x.T @ x, jnp.float32), "int4", 16)
    top = np.abs(w.astype("f4").reshape(4, 16, 7)).max(1)
    np.testing.assert_allclose(found.scale, top / 7.5, rtol=1e-6)
    ratio = (w.reshape(4, 16, 7) / np.asarray(found.scale)[:, None]).reshape(64, 7)
    inside = np.abs(ratio) < 7.4  # the largest lies halfway between two codes
    np.testing.assert_array_equal(np.round(ratio)[inside], np.asarray(found.codes)[inside])


@pytest.mark.parametrize("grid", [grid for grid in LEVELS if grid not in KINDS])
def test_scales_are_the_best_of_those_tried(grid):
    """With moments of one input at a time, the error of a group is a plain weighted sum."""
    w = problem(32, 5)[0].astype("f4")
    weights = np.exp(np.random.default_rng(1).standard_normal(32)).astype("f4")
    found = gptq(jnp.asarray(w), jnp.diag(jnp.asarray(weights)), grid, 0)
    rule, (low, high) = RULES[grid], LEVELS[grid]
    own = np.asarray(rule.scale(jnp.asarray(w)[None])[0])[0, 0]
    counted = weights + DAMPING * weights.mean()
    signs = (1, -1) if grid in BLOCKS else (1,)
    errors = {}
    for ratio in (s * r for s in signs for r in (1.0, *TRIED)):
        scale = np.asarray(rule.stored(jnp.asarray(own * np.float32(ratio))))
        codes = np.clip(np.asarray(rule.whole(jnp.asarray(w / scale))), low, high)
        errors[ratio] = (counted[:, None] * (w - codes * scale) ** 2).sum(0)
    best = np.min(list(errors.values()), axis=0)
    values = np.asarray(found.codes) * np.asarray(found.scale)
    np.testing.assert_allclose((counted[:, None] * (w - values) ** 2).sum(0), best, rtol=1e-4)


def test_inputs_that_were_never_seen_and_outputs_of_zeros():
    w, x = problem()
    x[:, 5:20] = 0.0
    w[:, 3] = 0.0
    found = gptq(jnp.asarray(w, jnp.float32), jnp.asarray(x.T @ x, jnp.float32), "int4", 16)
    values = np.asarray(found.codes) * np.repeat(np.asarray(found.scale), 16, axis=0)
    assert np.isfinite(values).all() and not values[:, 3].any()
    assert np.abs(values - w)[5:20].max() < 0.5 * np.abs(w).max()  # the least scale tried is half
    none = gptq(jnp.asarray(w, jnp.float32), jnp.zeros((64, 64)), "int4", 16)
    assert np.isfinite(none.scale).all() and none.error == 0
    # as if all inputs were alike, the best of the scales tried, of which the grid's own is one
    plain = nearest(jnp.asarray(w, jnp.float32), jnp.zeros((64, 64)), "int4", 16)
    apart = [
        np.square(np.asarray(each.codes) * np.repeat(np.asarray(each.scale), 16, axis=0) - w).sum()
        for each in (none, plain)
    ]
    assert 0 < apart[0] < apart[1]


def test_a_number_of_inputs_that_no_block_divides():
    w, x = problem(300, 4, 900)
    found = gptq(jnp.asarray(w, jnp.float32), jnp.asarray(x.T @ x, jnp.float32), "int8", 0)
    assert found.codes.shape == (300, 4) and found.error < 1e-4


def test_matrices_that_read_the_same_share_what_follows_from_it(monkeypatch):
    asked = []
    count = lambda moments: asked.append(1) or prepared(moments)  # noqa: E731
    monkeypatch.setattr("lmwright.quantize.gptq.prepared", count)
    one, (w, x) = partial(Rounder("gptq", 16), grid="int4"), problem()
    w, moments = (jnp.asarray(a, jnp.float32) for a in (w, x.T @ x))
    first = [one(w, moments), one(-w, moments + 0), one(w, jnp.eye(64))]
    assert len(asked) == 2
    alone = [gptq(w, moments, "int4", 16), gptq(-w, moments, "int4", 16),
             gptq(w, jnp.eye(64), "int4", 16)]  # fmt: skip
    for found, wanted in zip(first, alone, strict=True):
        np.testing.assert_array_equal(found.codes, wanted.codes)
    assert (first[2].codes != first[0].codes).any()
