"""xLSTM[a:b] by the equations of the paper in numpy's float64, token by token; documents, padding
and states; its folder."""

from functools import cache
from math import erf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import count_params, init_weights, walk
from lmwright.errors import UserError
from lmwright.formats.gguf_names import gguf_arch_of
from lmwright.formats.hf_read import import_hf
from lmwright.formats.open import find_model
from lmwright.models import cached
from lmwright.models.counts import cache_bytes
from lmwright.models.xlstm_blocks import XlstmBlocks
from tests.in_memory import export_hf

MODEL = XlstmBlocks(
    vocab_size=31, embed_dim=24, mlp_dim=40, num_layers=3, num_heads=2, seq_len=64, chunk_tokens=4,
    block_pattern=("mlstm", "slstm"),
)  # fmt: skip
NEAR = 1e-5  # of the output's scale
xp = np  # what the equations are computed by: jax.numpy where their gradients are asked for
ERF = {np: np.vectorize(erf), jnp: jax.scipy.special.erf}
TOKENS = np.random.default_rng(0).integers(0, 31, (1, 19))


@cache
def weights():
    """All of them random, gates among them."""
    fresh = init_weights(MODEL.spec(), jax.random.key(0))
    leaves, tree = jax.tree.flatten(fresh)
    draw = np.random.default_rng(1)
    new = [a + 0.2 * draw.standard_normal(a.shape).astype("f4") for a in leaves]
    return jax.tree.unflatten(tree, new)


def norm(x, scale, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / xp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def sigmoid(x):
    return 1 / (1 + xp.exp(-x))


def silu(x):
    return x * sigmoid(x)


def conv(w, rows):
    """What the filters make of the last row, which has others before it or not."""
    return w["conv_bias"] + sum(w["conv"][j] * rows[-1 - j] for j in range(min(4, len(rows))))


def mlstm_block(w, xs):
    heads, dim = w["skip"].shape
    matrix, count, m = xp.zeros((heads, dim, dim)), xp.zeros((heads, dim)), xp.zeros(heads)
    rows, out = [], []
    for x in xs:
        x = norm(x, w["norm"])
        rows.append(xp.einsum("d,dnh->nh", x, w["up"]))
        near = silu(conv(w, rows))
        blocks = lambda a, name: xp.einsum(  # noqa: E731
            "ngi,ngji->ngj", a.reshape(heads, -1, 4), w[name].reshape(heads, -1, 4, 4)
        ).reshape(heads, dim)
        q, k, v = blocks(near, "q"), blocks(near, "k"), blocks(rows[-1], "v")
        gates = sum(xp.einsum("nh,nhg->g", a, w["gates"][i]) for i, a in enumerate((q, k, v)))
        i = gates[:heads] + w["input_gate_bias"]
        log_f = -xp.logaddexp(0, -gates[heads:] - w["forget_gate_bias"])
        last, m = m, xp.maximum(log_f + m, i)
        keep, write = xp.exp(log_f + last - m), xp.exp(i - m)
        matrix = keep[:, None, None] * matrix + write[:, None, None] * k[..., None] * v[:, None]
        count = keep[:, None] * count + write[:, None] * k
        q = q / xp.sqrt(dim)
        below = xp.maximum(xp.abs((count * q).sum(-1)), xp.exp(-m)) + 1e-6
        h = norm(xp.einsum("nk,nkh->nh", q, matrix) / below[:, None], w["memory_norm"])
        gate = silu(xp.einsum("d,dnh->nh", x, w["output_gate"]))
        out.append(xp.einsum("nh,nhd->d", (h + w["skip"] * near) * gate, w["o"]))
    return xs + xp.array(out)


def slstm_block(w, xs):
    heads, dim = w["memory_norm"].shape
    c = n = h = xp.zeros((heads, dim))
    m = xp.full((heads, dim), -xp.inf)
    rows, out = [], []
    for x in xs:
        rows.append(norm(x, w["norm"]).reshape(heads, dim))
        near = silu(conv(w, rows))
        z, i, f, o = (
            xp.einsum("nh,nhk->nk", a, w["gates"][:, :, at]) + w.get(f"{name}_bias", 0)
            + xp.einsum("nh,nhk->nk", h, w["recurrent"][:, :, at])
            for at, (a, name) in enumerate([(rows[-1], "cell"), (near, "input_gate"),
                                            (near, "forget_gate"), (rows[-1], "output_gate")])
        )  # fmt: skip
        log_f = -xp.logaddexp(0, -f)
        last, m = m, xp.maximum(log_f + m, i)
        c = xp.exp(log_f + last - m) * c + xp.exp(i - m) * xp.tanh(z)
        n = xp.exp(log_f + last - m) * n + xp.exp(i - m)
        h = sigmoid(o) * c / n
        out.append(norm(h, w["memory_norm"]).reshape(-1))
    xs = xs + xp.array(out)
    y = norm(xs, w["mlp_norm"])
    gate = y @ w["gate"]
    gelu = gate * 0.5 * (1 + ERF[xp](gate / xp.sqrt(2.0)))
    return xs + (gelu * (y @ w["up"])) @ w["down"]


def by_hand(tokens, w=None):
    """Logits [T, V] of a text."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights()) if w is None else w
    blocks = {"mlstm": mlstm_block, "slstm": slstm_block}
    x = w["embed"][tokens]
    layers = {}
    for span in MODEL.spans:
        for path, kind, numbers in span.places():
            stack = w
            for part in path.split("."):
                stack = stack[part]
            for at, number in enumerate(numbers):
                layers[number] = kind, {name: leaf[at] for name, leaf in stack.items()}
    for number in sorted(layers):
        kind, layer = layers[number]
        x = blocks[kind.kind](layer, x)
    return norm(x, w["norm"]) @ w["head"]


def logits(w, tokens, ids):
    batch = Batch(*(jnp.asarray(a, jnp.int32) for a in (tokens, ids, 0 * ids)), ids > 0)
    return MODEL.logits(w, MODEL.hidden(w, batch, Compute())[0])


def test_logits_are_those_of_the_equations():
    found = jax.jit(logits)(weights(), TOKENS, np.ones_like(TOKENS))[0]
    want = by_hand(TOKENS[0])
    assert np.abs(found - want).max() <= NEAR * np.abs(want).max()


def test_packed_documents_and_padding_are_as_alone():
    """In logits, and in gradients: nothing of a document reaches another."""
    ids = np.repeat([0, 1, 2, 0], [2, 9, 6, 2])[None].astype(np.int32)
    w = weights()
    packed = np.asarray(jax.jit(logits)(w, TOKENS, ids))[0]
    for number in (1, 2):
        mine = ids[0] == number
        want = by_hand(TOKENS[0, mine])
        assert np.abs(packed[mine] - want).max() <= NEAR * np.abs(want).max()

    def second(embed, tokens):
        return jnp.sum(logits(w | {"embed": embed}, tokens, ids)[0, ids[0] == 2] ** 2)

    grad = jax.jit(jax.grad(second))(w["embed"], np.arange(19)[None])
    assert np.isfinite(grad).all() and np.any(grad[11]) and not np.any(grad[:11])
    assert not np.any(grad[17:])


@pytest.mark.slow
def test_gradients_are_those_of_the_equations(monkeypatch):
    """Of every weight, in a row of two documents."""
    ids = np.repeat([1, 2], [10, 9])[None].astype(np.int32)
    pull = np.random.default_rng(3).standard_normal((19, 31))
    found = jax.jit(jax.grad(lambda w: jnp.sum(logits(w, TOKENS, ids)[0] * pull)))(weights())
    monkeypatch.setitem(globals(), "xp", jnp)

    def total(w):
        rows = [by_hand(TOKENS[0, ids[0] == number], w) for number in (1, 2)]
        return jnp.sum(jnp.concatenate(rows) * pull)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), weights())
        want = jax.grad(total)(wide)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        off = np.abs(np.asarray(mine) - np.asarray(theirs)).max()
        assert off <= 3 * NEAR * np.abs(theirs).max()


def test_a_row_token_by_token_is_the_row():
    """A left-padded batch, of which ten tokens come at once, three and padding one by one; the
    state has the same bytes at any length."""
    w, compute = weights(), Compute()
    tokens = np.concatenate([TOKENS, TOKENS[:, ::-1]])[:, :14]
    real = np.ones((2, 14), bool)
    real[1, :6] = real[1, 11] = False
    cache = cached.new_cache(MODEL, 2, 16, compute)
    size = lambda cache: sum(a.nbytes for a in jax.tree.leaves(cache["layers"]))  # noqa: E731
    assert size(cache) == size(cached.new_cache(MODEL, 2, 64, compute))
    extend = jax.jit(
        lambda t, r, cache, first: cached.extend(MODEL, w, t, r, cache, compute, empty_cache=first),
        static_argnums=3,
    )
    first, cache = extend(tokens[:, :10], real[:, :10], cache, True)
    parts = [first]
    for at in range(10, 14):
        hidden, cache = extend(tokens[:, at : at + 1], real[:, at : at + 1], cache, False)
        parts.append(hidden)
    found = MODEL.logits(w, jnp.concatenate(parts, axis=1))
    for row in (0, 1):
        want = by_hand(tokens[row, real[row]])
        assert np.abs(found[row][real[row]] - want).max() <= NEAR * np.abs(want).max()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"model.num_heads: 5 heads do not divide .* use 4"):
        XlstmBlocks(vocab_size=31, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=5, seq_len=64)


def test_its_folder_is_read_here_alone_and_there_is_no_gguf(tmp_path):
    proof = export_hf(MODEL, weights(), None, tmp_path / "out")
    assert "cannot load" in proof.transformers
    model, again, _ = import_hf(tmp_path / "out")
    assert model == MODEL
    for (path, a), (_, b) in zip(walk(weights()), walk(again), strict=True):
        np.testing.assert_array_equal(a, b, path)
    with pytest.raises(UserError, match=r"xLSTMBlocksForCausalLM: has no GGUF form here"):
        gguf_arch_of(MODEL.hf.config(MODEL))


def test_its_work_is_known():
    """Weights of a token by the papers' shapes, and a state of constant bytes."""
    model = find_model("xlstm-7-1-164m")
    d, h, n = 768, 384, 4
    mlstm = 3 * d * n * h + 4 * n * h + 3 * 4 * n * h + 3 * n * h * 2 * n + 2 * n + 3 * n * h + d
    cells = 2 * 4 * d * 192 + 3 * d + 4 * d + 2 * d + 3 * d * 1024 + 2 * d
    outer = 2 * 50_304 * d + d
    assert count_params(model.spec()) == 21 * mlstm + 3 * cells + outer == 163_631_016
    by_hand = 21 * n * (h * h + h + 1) * 4 + 3 * 4 * d * 4 + (21 * 3 * 2 * d + 3 * 3 * d) * 2
    assert cache_bytes(model, 1) == cache_bytes(model, 2048) == by_hand
    found = model.work(2048).flops_per_token() / 6
    matmuls = 21 * 3 * d * n * h + 3 * 3 * d * 1024 + 50_304 * d
    assert matmuls < found < 1.6 * matmuls
