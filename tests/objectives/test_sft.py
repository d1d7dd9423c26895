"""The objective of fine-tuning against torch, numpy and the paper of its noise."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.evals.loss import evaluate_rows
from lmwright.models.llama import Llama
from lmwright.nn.xent import chunked_xent
from lmwright.objectives.clm import Clm, next_tokens
from lmwright.objectives.sft import Sft, embedding_noise

B, T, V = 3, 23, 19
HOW = Compute(precision="fp32", loss_chunk_tokens=7)
MODEL = Llama(
    vocab_size=V, embed_dim=12, mlp_dim=20, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=T,
)  # fmt: skip


def problem():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((B, T, 11)).astype(np.float32)
    w = rng.standard_normal((11, V)).astype(np.float32)
    return x, w, rng.integers(0, V, (B, T)), rng.integers(0, 2, (B, T)).astype(np.float32)


def test_label_smoothing_equals_torch():
    torch = pytest.importorskip("torch")
    x, w, targets, weights = problem()
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    losses = torch.nn.functional.cross_entropy(
        (leaves[0] @ leaves[1]).reshape(-1, V),
        torch.tensor(targets).reshape(-1),
        label_smoothing=0.13,
        reduction="none",
    )
    wanted = (losses * torch.tensor(weights).reshape(-1)).sum()
    wanted.backward()

    def ours(x, w):
        logits = lambda w, x: jnp.einsum("btd,dv->btv", x, w)  # noqa: E731
        sums = chunked_xent(logits, w, x, targets, weights, chunk=4, smoothing=0.13)
        return sums.total, sums.nll

    (total, nll), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(x, w)
    np.testing.assert_allclose(total, wanted.item(), rtol=1e-6)
    for ours_, theirs in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(ours_, theirs.grad.numpy(), rtol=1e-4, atol=1e-5)
    logits = jnp.einsum("btd,dv->btv", x, w)
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(nll, jnp.sum(plain * weights), rtol=1e-6)
    assert abs(float(total) - float(nll)) > 1


def batch():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 9 + [2] * 14, [1] * 20 + [0] * 3, [1] * 3 + [2] * 5 + [3] * 15])
    starts = np.concatenate([np.ones((B, 1), bool), np.diff(segments) != 0], axis=1)
    positions = np.arange(T) - np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    learned = (segments > 0) & ~starts & (rng.random((B, T)) < 0.5)
    return Batch(
        tokens=jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        segment_ids=jnp.asarray(segments, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        loss_weight=jnp.asarray(learned, jnp.float32),
    )


def test_the_loss_is_that_of_the_completions():
    w, rows = init_weights(MODEL.spec(), jax.random.key(1)), batch()
    logits = jax.jit(lambda w: MODEL.logits(w, MODEL.hidden(w, rows, HOW)[0]))(w)
    logits = np.asarray(logits, np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = 0.0
    for b in range(B):
        for t in range(1, T):
            wanted -= rows.loss_weight[b, t] * logs[b, t - 1, rows.tokens[b, t]]
    ours = Sft().loss(MODEL, w, rows, jax.random.key(0), HOW)
    np.testing.assert_allclose(ours.total, wanted, rtol=1e-5)
    assert float(ours.weight) == float(rows.loss_weight.sum()) > 0
    same = Clm().loss(MODEL, w, rows, jax.random.key(0), HOW)
    assert float(same.total) == float(ours.total)

    smooth = Sft(label_smoothing=0.2).loss(MODEL, w, rows, jax.random.key(0), HOW)
    learned = np.roll(rows.loss_weight, -1, axis=1)
    spread = -np.sum(learned[:, :-1] * logs.mean(-1)[:, :-1])
    np.testing.assert_allclose(smooth.total, 0.8 * wanted + 0.2 * spread, rtol=1e-5)


def test_the_last_token_of_a_row_predicts_nothing():
    """Not the first one, though that may be learned in rows that a text goes on in."""
    rows = batch()
    rows = replace(rows, loss_weight=jnp.ones((B, T)))
    targets, weights = map(np.asarray, next_tokens(rows))
    np.testing.assert_array_equal(targets[:, :-1], rows.tokens[:, 1:])
    assert (weights[:, :-1] == 1).all() and (weights[:, -1] == 0).all()


def test_rows_that_are_measured_have_no_noise():
    assert Sft(neftune_alpha=3.0, label_smoothing=0.1).for_eval() == Sft(label_smoothing=0.1)


def test_noise_is_that_of_the_paper():
    rows = batch()
    noise = np.asarray(embedding_noise(rows, 12, 5.0, jax.random.split(jax.random.key(4), B)))
    ids = np.asarray(rows.segment_ids)
    for b in range(B):
        for segment in np.unique(ids[b]):
            mine = noise[b][ids[b] == segment]
            if segment == 0:
                assert not mine.any()
                continue
            most = 5.0 / np.sqrt(len(mine) * 12)
            assert np.abs(mine).max() <= most
            # uniform: its spread is most / sqrt(3)
            assert abs(np.sqrt((mine**2).mean()) / (most / np.sqrt(3)) - 1) < 0.2
            assert abs(mine.mean()) < 0.3 * most
    again = np.asarray(embedding_noise(rows, 12, 5.0, jax.random.split(jax.random.key(4), B)))
    np.testing.assert_array_equal(noise, again)
    assert (
        noise != np.asarray(embedding_noise(rows, 12, 5.0, jax.random.split(jax.random.key(5), B)))
    ).any()


def test_noise_is_on_the_embeddings_alone_and_only_in_training():
    w, rows = init_weights(MODEL.spec(), jax.random.key(1)), batch()
    key, noisy = jax.random.split(jax.random.key(7), B), Sft(neftune_alpha=3.0, label_smoothing=0.1)

    class Shifted(Llama):
        """The same model whose embeddings are told outright."""

        def embedded(self, w, tokens, compute):
            return super().embedded(w, tokens, compute) + noise

    noise = embedding_noise(rows, 12, 3.0, key)
    told = Shifted(**vars(MODEL))
    both = lambda objective, model: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda w: objective.loss(model, w, rows, key, HOW).total)
    )(w)
    ours, grads = both(noisy, MODEL)
    theirs, their_grads = both(Sft(label_smoothing=0.1), told)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(their_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert noisy.for_eval().neftune_alpha == 0 and Clm().for_eval() == Clm()
    arrays = {name: np.asarray(getattr(rows, name)) for name in Batch.__dataclass_fields__}
    arrays["text_bytes"] = np.ones(B, np.int64)
    found = [evaluate_rows(MODEL, o, HOW, w, "s", [arrays]) for o in (noisy, Clm())]
    assert found[0] == found[1]
