"""Masked diffusion: exact counts of masks, unbiased sums, and the same numbers however a batch is
cut."""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.evals.loss import evaluate_rows
from lmwright.evals.text import evaluate_text
from lmwright.models.llada import Llada
from lmwright.objectives.diffusion import Diffusion
from lmwright.objectives.mask_draws import Draws, mask_rows, most_masks
from tests.objectives.cut_batches import CUTS, after_step
from tests.objectives.test_mlm import Tokens

V, T, MASK = 50, 40, 3
MODEL = Llada(
    vocab_size=V, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=T,
)  # fmt: skip


def rows(count, real=T, prompt=1):
    """A batch [count, T] of one document a row, whose first `prompt` tokens are given."""
    tokens = np.random.default_rng(2).integers(4, V, (count, T))
    at = np.broadcast_to(np.arange(T), tokens.shape)
    inside = at < real
    arrays = (tokens * inside, inside.astype(int), at * inside)
    learned = (inside & (at >= prompt)).astype(np.float32)
    return Batch(*map(jnp.asarray, (*arrays, learned)))


draws_of = jax.jit(Diffusion().draws, static_argnums=2)
masks_of = jax.jit(mask_rows)


def drawn(count, seed=1):
    return draws_of(jax.random.key(seed), jnp.arange(count), count)


def test_each_row_has_its_count_of_masks_and_weighs_as_many_tokens_as_it_has():
    for real, prompt in ((T, 1), (33, 9), (7, 1), (2, 1), (1, 1)):
        batch, draws = rows(64, real, prompt), drawn(64)
        masked, weights = map(np.asarray, masks_of(batch, draws))
        learned = np.asarray(batch.loss_weight) > 0
        assert not masked[~learned].any() and np.all((weights > 0) == masked)
        count = real - prompt
        wanted = np.minimum(np.floor(np.asarray(draws.time) * count) + 1, count)
        np.testing.assert_array_equal(masked.sum(1), wanted)
        np.testing.assert_allclose(weights.sum(1), count, rtol=1e-6)


def test_times_are_one_in_each_equal_part():
    for seed in range(5):
        parts = np.floor(np.asarray(drawn(16, seed).time) * 16)
        assert sorted(parts) == list(range(16))
    firsts = [float(drawn(16, seed).time[0]) for seed in range(200)]
    assert abs(np.mean(firsts) - 0.5) < 4 * (1 / 12 / 200) ** 0.5  # any row may have any time


@pytest.mark.parametrize("microbatches, devices", [(1, 1), (4, 1), (2, 8), (8, 2)])
def test_rows_of_a_device_have_evenly_spread_times(microbatches, devices):
    """However a batch of 64 rows is cut: so their masks are bounded."""
    size = 64 // microbatches
    key, bound = jax.random.key(5), most_masks(size // devices, T)
    assert bound < T * (size // devices + 3) / 2
    for index in range(microbatches):
        draws = draws_of(key, jnp.arange(size) * microbatches + index, 64)
        assert draws.spread == size
        whole = draws_of(key, jnp.arange(64), 64)
        np.testing.assert_array_equal(draws.time, whole.time[index::microbatches])
        parts = np.floor(np.asarray(draws.time).reshape(devices, -1) * (size // devices))
        np.testing.assert_array_equal(np.sort(parts, axis=1)[0], np.arange(size // devices))
        masks = np.asarray(masks_of(rows(size), draws).masked).sum(1).reshape(devices, -1)
        assert masks.sum(1).max() <= bound
    assert draws_of(key, jnp.arange(6), 6).spread == 1


def test_the_head_runs_over_little_more_than_half_of_the_tokens():
    """Of rows whose times are known to be spread: the same loss and gradients for fewer FLOPs."""
    model, objective = replace(MODEL, vocab_size=2000, num_layers=1), Diffusion(mask_token_id=MASK)
    w, batch, draws = init_weights(model.spec(), jax.random.key(0)), rows(8, 37), drawn(8)
    total = lambda w, draws: objective.loss(model, w, batch, draws, Compute()).total  # noqa: E731
    step = jax.jit(jax.value_and_grad(total))
    picked, whole = draws, replace(draws, spread=1)
    for ours, theirs in zip(*map(jax.tree.leaves, (step(w, picked), step(w, whole))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)
    flops = [step.lower(w, d).compile().cost_analysis()["flops"] for d in (picked, whole)]
    assert flops[0] < 0.66 * flops[1]


def test_the_loss_is_the_weighted_cross_entropy_at_the_masks():
    objective = Diffusion(mask_token_id=MASK)
    w, batch, draws = init_weights(MODEL.spec(), jax.random.key(0)), rows(3, 31, 6), drawn(3)
    compute = Compute(loss_chunk_tokens=5)
    found = jax.jit(lambda w: objective.loss(MODEL, w, batch, draws, compute))(w)
    masked, weights = jax.jit(mask_rows)(batch, draws)
    seen = replace(batch, tokens=jnp.where(masked, MASK, batch.tokens))
    logits = jax.jit(lambda w: MODEL.logits(w, MODEL.hidden(w, seen, Compute())[0]))(w)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens)
    np.testing.assert_allclose(found.total, np.sum(each * weights), rtol=1e-5)
    np.testing.assert_allclose(found.weight, 3 * 25, rtol=1e-6)
    # where outputs predict the next token, those before the masks are read
    shifted = replace(MODEL, predicts="next")
    other = jax.jit(lambda w: objective.loss(shifted, w, batch, draws, Compute()))(w)
    before = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch.tokens[:, 1:])
    np.testing.assert_allclose(other.total, np.sum(before * weights[:, 1:]), rtol=1e-5)


@pytest.mark.parametrize("microbatches, devices", CUTS)
def test_the_same_tokens_are_masked_however_a_batch_is_cut(microbatches, devices):
    """Updated weights of a step, of rows with padding and several documents."""

    after = partial(after_step, MODEL, Diffusion(mask_token_id=MASK))
    (plain, one), (other, two) = after(1, 1), after(microbatches, devices)
    for name in ("loss", "target_tokens", "accuracy"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_padding_does_not_change_the_loss():
    """A row and the same row with padding behind: the masks differ, the mean over draws does not;
    here all learned tokens are masked, so that nothing is left to chance."""
    objective = Diffusion(mask_token_id=MASK)
    w = init_weights(MODEL.spec(), jax.random.key(0))
    draws = Draws(jax.random.split(jax.random.key(0), 2), jnp.full(2, 0.999))
    padded = rows(2, 21)
    short = jax.tree.map(lambda a: a[:, :21], padded)
    with_empty = jax.tree.map(lambda a: a.at[1].set(0), padded)
    losses = [
        objective.loss(MODEL, w, each, draws, Compute()) for each in (padded, short, with_empty)
    ]
    np.testing.assert_allclose(losses[0].total, losses[1].total, rtol=1e-5)
    assert float(losses[0].weight) == float(losses[1].weight) == 40
    assert float(losses[2].weight) == 20


def test_end_tokens_are_learned_behind_a_text_that_ends():
    batch = rows(3, 30, 6)
    tokens = batch.tokens.at[0, 29].set(7).at[1, 29].set(8)  # the last of row 0 alone is an end
    batch = replace(batch, tokens=tokens, segment_ids=2 * batch.segment_ids)
    batch = jax.tree.map(lambda a: a.at[2].set(0), batch)  # all padding
    found = Diffusion(end_tokens=4, end_token_id=7).cut(batch, drawn(3))
    added = slice(30, 34)
    np.testing.assert_array_equal(found.tokens[0, added], 7)
    np.testing.assert_array_equal(found.positions[0, added], np.arange(30, 34))
    expected = jax.tree.map(lambda a: np.array(a), batch)
    expected.tokens[0, added], expected.segment_ids[0, added] = 7, 2
    expected.positions[0, added], expected.loss_weight[0, added] = np.arange(30, 34), 1
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_share_of_rows_is_cut_to_any_length():
    count = 4000
    found = Diffusion(short_rows=0.25).cut(rows(count), drawn(count))
    lengths = np.asarray(found.segment_ids).sum(1)
    assert np.all(np.asarray(found.loss_weight).sum(1) == lengths - 1)
    short = lengths[lengths < T]
    assert abs(len(short) / count - 0.25 * (T - 1) / T) < 5 * (0.25 * 0.75 / count) ** 0.5
    assert set(short) == set(range(1, T))
    assert abs(short.mean() - T / 2) < 5 * T / (12 * len(short)) ** 0.5


def test_ids_come_from_the_tokenizer():
    tokens = Tokens({"<eos>": 7, "<mask>": 9}, "<mask>")
    tokens.eos_id = None
    assert Diffusion().with_tokenizer(tokens) == Diffusion(mask_token_id=9)
    with pytest.raises(UserError, match=r"no token that ends a text; set objective\.end_token_id"):
        Diffusion(end_tokens=4).with_tokenizer(tokens)
    tokens.eos_id = 7
    assert Diffusion(end_tokens=4).with_tokenizer(tokens).end_token_id == 7
    with pytest.raises(UserError, match=r"has no mask token; prepare with '<\|mask\|>'"):
        Diffusion().with_tokenizer(Tokens({"<eos>": 7}))
    with pytest.raises(UserError, match="end_token_id: has no effect without"):
        Diffusion(end_token_id=3)


def exact_bound(model, w, tokens):
    """Mean over the number k of masks, and over all sets of k, of n / k times the loss there."""
    n = len(tokens) - 1
    sets = [s for k in range(1, n + 1) for s in itertools.combinations(range(1, n + 1), k)]
    masked = np.zeros((len(sets), len(tokens)), bool)
    for row, places in enumerate(sets):
        masked[row, list(places)] = True
    batch = Batch(
        jnp.where(masked, MASK, tokens), jnp.ones(masked.shape, jnp.int32),
        jnp.broadcast_to(jnp.arange(len(tokens)), masked.shape), jnp.asarray(masked, jnp.float32),
    )  # fmt: skip
    logits = model.logits(w, model.hidden(w, batch, Compute())[0])
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.broadcast_to(jnp.asarray(tokens), masked.shape)
    )
    k = masked.sum(1)
    share = np.array([1 / math.comb(n, size) for size in k]) / n
    return float(np.sum(share * n / k * np.sum(np.asarray(each) * masked, axis=1)))


def test_the_bound_is_that_of_all_sets_of_masks():
    """Monte Carlo against enumeration: within 4 standard errors and 1 %."""
    size, length, num = 9, 7, 4000
    model = replace(MODEL, vocab_size=size)
    spread = lambda w: 4 * w  # noqa: E731  # so that the loss depends on what is masked
    w = jax.tree.map(spread, init_weights(model.spec(), jax.random.key(3)))
    tokens = np.array([4, 7, 5, 5, 8, 4, 6])
    expected = exact_bound(model, w, tokens)
    shape = (num, length)
    at = jnp.broadcast_to(jnp.arange(length), shape)
    batch = Batch(
        jnp.broadcast_to(jnp.asarray(tokens), shape), jnp.ones(shape, jnp.int32), at,
        (at > 0).astype(jnp.float32),
    )  # fmt: skip
    objective = Diffusion(mask_token_id=MASK)
    one = jax.jit(jax.vmap(lambda row, draws: objective.loss(
        model, w, jax.tree.map(lambda a: a[None], row), jax.tree.map(lambda a: a[None], draws),
        Compute()).total))  # fmt: skip
    # independent times, so that the error is that of a mean of independent rows
    keys, times = jax.random.split(jax.random.key(8), num), jax.random.uniform(
        jax.random.key(9), (num,)
    )  # fmt: skip
    totals = np.asarray(one(batch, Draws(keys, times)))
    error = totals.std() / num**0.5
    assert error < 0.01 * expected
    assert abs(totals.mean() - expected) < min(4 * error, 0.01 * expected)
    # as a held-out row is measured
    rows = {n: np.asarray(a)[:1] for n, a in vars(batch).items()} | {"text_bytes": np.array([11])}
    held = evaluate_rows(model, replace(objective, eval_samples=num), Compute(), w, "t", [rows])
    assert held.tokens == length - 1 and held.text_bytes == 11
    assert abs(held.loss * held.tokens - expected) < min(4 * error, 0.01 * expected)


def test_the_windows_of_a_text_are_measured_by_the_bound():
    """Two windows of 4 tokens, of which the second begins with the last token of the first."""
    model = replace(MODEL, vocab_size=9)
    w = jax.tree.map(lambda w: 4 * w, init_weights(model.spec(), jax.random.key(3)))
    ids = [4, 7, 5, 5, 8, 4, 6]
    expected = exact_bound(model, w, np.array(ids[:4])) + exact_bound(model, w, np.array(ids[3:]))
    objective = Diffusion(mask_token_id=MASK, eval_samples=3000)
    found = evaluate_text(model, w, ids, context=4, compute=Compute(), objective=objective)
    assert found.tokens == 6
    assert found.loss * 6 == pytest.approx(expected, rel=0.01)
    with pytest.raises(UserError, match="stride: 4 must be from 1 to 3"):
        evaluate_text(model, w, ids, context=4, stride=4, compute=Compute(), objective=objective)
    with pytest.raises(UserError, match="'llada' fills in masks and predicts no next tokens"):
        evaluate_text(model, w, ids, context=4)


def test_evenly_spread_times_and_exact_counts_vary_seven_times_less():
    """Standard deviation of a batch's loss, whose tokens cost more the more is masked, against
    independent times and coins for each token (LLaDA's training loss)."""
    B, L, num = 16, 256, 200
    cost = lambda t: 2 + 5 * t  # noqa: E731
    ids = jnp.ones((B, L), jnp.int32)
    batch = Batch(ids, ids, ids, ids.astype(jnp.float32))

    def even(key):
        masked, weights = mask_rows(batch, Diffusion().draws(key, jnp.arange(B), B))
        return jnp.sum(weights * cost(masked.mean(1, keepdims=True))) / (B * L)

    def independent(key):
        for_time, for_coins = jax.random.split(key)
        t = 1e-3 + (1 - 1e-3) * jax.random.uniform(for_time, (B, 1))
        masked = jax.random.uniform(for_coins, (B, L)) < t
        return jnp.sum(masked / t * cost(t)) / (B * L)

    keys = jax.random.split(jax.random.key(0), num)
    ours, plain = (np.asarray(jax.jit(jax.vmap(f))(keys)) for f in (even, independent))
    assert abs(ours.mean() - 4.5) < 0.02 and abs(plain.mean() - 4.5) < 0.1
    assert ours.std() < plain.std() / 7


def test_held_out_rows_are_measured_the_same_each_time():
    objective = Diffusion(mask_token_id=MASK, eval_samples=3)
    w, batch = init_weights(MODEL.spec(), jax.random.key(0)), rows(6)
    plain = {name: np.asarray(getattr(batch, name)) for name in Batch.__dataclass_fields__}
    plain["text_bytes"] = np.full(6, 100)

    def measured(cuts):
        pieces = [{n: a[cut] for n, a in plain.items()} for cut in cuts]
        return evaluate_rows(MODEL, objective, Compute(), w, "rows", pieces)

    whole, cut = measured([slice(0, 6)]), measured([slice(0, 2), slice(2, 6)])
    assert whole.tokens == cut.tokens == 6 * (T - 1)
    assert whole.text_bytes == 600  # each token is predicted, so these are its bytes
    np.testing.assert_allclose(whole.loss, cut.loss, rtol=1e-6)


def test_what_changes_rows_while_training_changes_none_that_are_held_out():
    plain = Diffusion(mask_token_id=MASK, block_tokens=5)
    assert replace(plain, short_rows=0.5, views="complementary").for_eval() == plain.for_eval()
