"""8-bit Adam: its code, its size, and that training follows fp32 Adam."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.core.param import Param, count_params, init_weights, stack, walk
from lmwright.optim.adam8bit import _split, block_size, decode, encode
from lmwright.optim.build import build_optimizer
from lmwright.optim.kinds import Adam8bit, AdamW
from tests.in_memory import abstract_weights


@given(st.integers(1, 60000))
def test_blocks_cover_an_axis(size):
    block = block_size(size)
    assert 1 <= block <= min(size, 2048)
    assert size % block == 0 or block == 2048


@pytest.mark.parametrize(
    "size, block",
    [(64, 64), (1536, 1536), (3072, 1536), (8192, 1024), (50304, 1572), (32003, 2048)],
)
def test_blocks_of_real_axes(size, block):
    assert block_size(size) == block


@settings(max_examples=12, deadline=None)
@given(size=st.sampled_from([5, 64, 3072, 2053]), seed=st.integers(0, 99), zeros=st.booleans())
def test_codes_are_within_half_a_step(size, seed, zeros):
    """Neighboring codes c and c + 1 bound what is between them; the top is exact."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(3, size)) * 10 ** rng.uniform(-6, 2, size=(3, 1))).astype("float32")
    if zeros:
        x[1] = 0
    for values, dtype, top in ((x, jnp.int8, 127), (x * x, jnp.uint8, 255)):
        scale = jnp.abs(_split(jnp.asarray(values))).max(-1)
        codes = encode(jnp.asarray(values), scale, dtype)
        assert codes.dtype == dtype and codes.shape == values.shape
        got = np.asarray(decode(codes, scale), "float64")
        of_each = np.repeat(np.asarray(scale), block_size(size), -1)[:, :size].astype("float64")
        code = np.abs(np.asarray(codes, "float64"))
        high = of_each * ((code + 0.501) / top) ** 4
        low = of_each * (np.maximum(code - 0.501, 0) / top) ** 4
        if dtype == jnp.uint8:
            low = np.where(code == 1, 0, low)  # code 1 also stands for what is smaller
        assert np.all((np.abs(values) <= high) & (np.abs(values) >= low))
        assert np.all(np.sign(got) * np.sign(values) >= 0)
        peak = np.abs(values) == of_each
        np.testing.assert_allclose(got[peak], values[peak], rtol=1e-5)


def test_state_is_about_two_bytes_a_weight():
    """The 135M shape of the benchmarks, without an array."""
    layer = {
        "q": Param("embed -> heads head_dim", (576, 9, 64)),
        "k": Param("embed -> kv_heads head_dim", (576, 3, 64)),
        "v": Param("embed -> kv_heads head_dim", (576, 3, 64)),
        "o": Param("heads head_dim -> embed", (9, 64, 576)),
        "gate": Param("embed -> mlp", (576, 1536)),
        "up": Param("embed -> mlp", (576, 1536)),
        "down": Param("mlp -> embed", (1536, 576)),
        "norm": Param("norm", (576,), fill=1.0),
    }
    spec = {"embed": Param("vocab -> embed", (49152, 576)), "layers": stack(layer, 30)}
    weights = abstract_weights(spec)

    def state_bytes(optim):
        state = jax.eval_shape(build_optimizer(optim, spec, 10).init, weights)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    num = count_params(spec)
    assert state_bytes(Adam8bit(learning_rate=1e-3)) <= 2.1 * num
    assert state_bytes(AdamW(learning_rate=1e-3)) >= 8 * num


def language_model():
    """Characters predicted from the eight before them: embeddings, two matrices, a head."""
    text = np.minimum(np.fromfile(argparse.__file__, np.uint8)[:40000], 127).astype("int32")
    rows = np.lib.stride_tricks.sliding_window_view(text, 9)
    spec = {
        "embed": Param("vocab -> embed", (128, 24)),
        "up": Param("seq embed -> mlp", (8, 24, 200)),
        "norm": Param("norm", (200,), fill=1.0),
        "head": Param("mlp -> vocab", (200, 128)),
    }

    def loss(w, batch):
        x = w["embed"][batch[:, :8]]  # [B, T, D]
        h = jax.nn.gelu(jnp.einsum("btd,tdf->bf", x, w["up"])) * w["norm"]
        logits = h @ w["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 8]).mean()

    return spec, rows, loss


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_training_follows_fp32(beta2):
    """Bytes of a real file, 200 steps: the smoothed loss ends within 1 % of fp32 Adam's, and
    the weights moved in the same direction."""
    spec, rows, loss = language_model()
    start = init_weights(spec, jax.random.key(0))

    def train(kind):
        tx = build_optimizer(kind(learning_rate=3e-3, beta2=beta2, weight_decay=0.01), spec, 200)

        @jax.jit
        def step(w, state, batch):
            value, grads = jax.value_and_grad(loss)(w, batch)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state, value

        w, state, rng, values = start, tx.init(start), np.random.default_rng(0), []
        for _ in range(200):
            w, state, value = step(w, state, rows[rng.integers(len(rows), size=64)])
            values.append(float(value))
        return dict(walk(w)), np.array(values)

    (exact, want), (coded, got) = train(AdamW), train(Adam8bit)
    assert want[-30:].mean() < 0.6 * want[:5].mean(), "the problem is learned"
    assert abs(got[-30:].mean() / want[-30:].mean() - 1) < 0.01
    first = dict(walk(start))
    for path in ("embed", "up", "head"):
        a, b = (np.ravel(w[path] - first[path]) for w in (exact, coded))
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, path
    assert not np.array_equal(exact["up"], coded["up"])
