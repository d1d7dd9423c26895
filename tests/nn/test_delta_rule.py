"""The gated delta rule in chunks and token by token equals transformers' recurrence; documents and
padding do not reach each other."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn import delta_rule as ours
from tests.nn.test_mlstm import LENGTH, ROWS, segment_ids

torch = pytest.importorskip("torch", reason="torch is the reference")
theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

KEYS, HEADS, KEY, HEAD = 2, 6, 8, 12
NEAR = 1e-5  # of the largest value
ALONE = jnp.ones((ROWS, LENGTH), jnp.int32)


@cache
def inputs():
    """q, k, v, b and g, with strong writes and with decays from almost none to almost all."""
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((ROWS, LENGTH, *dims)).astype("f4")  # noqa: E731
    q, k = (ours.unit(jnp.asarray(normal(KEYS, KEY))) for _ in "qk")
    strength = 1 / (1 + np.exp(-normal(HEADS) - 2))
    return q, k, normal(HEADS, HEAD), strength, -np.exp(2 * normal(HEADS) - 2)


def recurrence(arrays, weight):
    """Results, the memory after them and the gradients of their sum times `weight`."""
    q, k, v, b, g = (torch.tensor(np.asarray(a), requires_grad=True) for a in arrays)
    wide = [a.repeat_interleave(HEADS // KEYS, 2) for a in (q, k)]
    out, last = theirs.torch_recurrent_gated_delta_rule(
        *wide, v, g=g, beta=b, output_final_state=True
    )
    (out * torch.tensor(weight)).sum().backward()
    return out.detach().numpy(), last.detach().numpy(), [a.grad.numpy() for a in (q, k, v, b, g)]


@cache
def reference():
    return recurrence(inputs(), weight())


def weight():
    return np.random.default_rng(1).standard_normal((ROWS, LENGTH, HEADS, HEAD)).astype("f4")


def assert_near(mine, other, share=NEAR):
    assert np.abs(np.asarray(mine) - other).max() <= share * np.abs(other).max()


@pytest.mark.parametrize("size", [1, 16, 50, 64, 256])
def test_chunks_equal_the_recurrence(size):
    run = jax.jit(lambda *a: ours.delta_rule(*a, ALONE, size))
    out, _, grads = reference()
    assert_near(run(*inputs()), out, 2 * NEAR)  # sums of up to 150 decays
    mine = jax.grad(lambda *a: jnp.sum(run(*a) * weight()), argnums=range(5))(*inputs())
    for one, other in zip(mine, grads, strict=True):
        assert_near(one, other, 2 * NEAR)


def test_memory_goes_on():
    """Some tokens in chunks, then one by one."""
    memory, parts = ours.empty(ROWS, HEADS, KEY, HEAD), []
    cuts = [0, 40, 139, *range(140, LENGTH + 1)]
    for start, end in pairwise(cuts):
        some = [a[:, start:end] for a in (*inputs(), ALONE)]
        out, memory = ours.delta_rule_from(memory, *some, chunk_tokens=16)
        parts.append(out)
    out, last, _ = reference()
    assert_near(jnp.concatenate(parts, 1), out, 2 * NEAR)
    assert_near(memory, last, 2 * NEAR)


def of_padding(array, ids):
    """Strengths or decays without those of padding, as `gates` gives them."""
    return np.where((ids > 0)[..., None], array, 0)


def test_documents_are_apart():
    ids = segment_ids()
    q, k, v, b, g = inputs()
    b, g = of_padding(b, ids), of_padding(g, ids)
    own = weight() * (ids > 0)[..., None, None]

    def total(*arrays):
        out = ours.delta_rule(*arrays, ids, 16)
        return jnp.sum(out * own), out

    both = jax.value_and_grad(total, argnums=range(5), has_aux=True)
    (_, mixed), grads = jax.jit(both)(q, k, v, b, g)
    for row in range(ROWS):
        for document in set(ids[row]) - {0}:
            mine = ids[row] == document
            some = [np.asarray(a)[row : row + 1, mine] for a in (q, k, v, b, g)]
            out, _, wanted = recurrence(some, own[row : row + 1, mine])
            assert_near(mixed[row, mine], out[0])
            for one, other in zip(grads, wanted, strict=True):
                assert_near(one[row, mine], other[0], 2 * NEAR)


def test_padding_has_no_gates():
    ids = segment_ids()
    rng = np.random.default_rng(2)
    write, decay = (rng.standard_normal((ROWS, LENGTH, HEADS)).astype("f4") for _ in "ab")
    b, g = ours.gates(write, decay, np.ones(HEADS, "f4"), np.ones(HEADS, "f4"), ids)
    wanted = -np.e * np.logaddexp(0, decay + 1.0)
    np.testing.assert_allclose(g, of_padding(wanted, ids), rtol=1e-5)
    np.testing.assert_allclose(b, of_padding(1 / (1 + np.exp(-write)), ids), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 37, 64])
def test_the_inverse_of_equal_keys(size):
    """Powers of this matrix reach 10^18, its inverse only 1."""
    a = np.tril(np.ones((3, size, size), "f4"), -1)
    inverse = ours.inverted(jnp.asarray(a), jax.lax.Precision.HIGHEST)
    np.testing.assert_array_equal(inverse, np.linalg.inv(a[0] + np.eye(size))[None].repeat(3, 0))
