"""Masked language modeling: which tokens are hidden, the head at their places, and the same numbers
however a batch is cut."""

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
from lmwright.evals.compute import decode_compute
from lmwright.evals.loss import evaluate_rows
from lmwright.evals.positions import position_losses
from lmwright.evals.text import evaluate_text
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.mlm import Mlm
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.step_time import LOGITS_PASSES
from lmwright.planner.subject import subject
from tests.objectives.cut_batches import CUTS, after_step

V, T, MASK = 50, 40, 3
MODEL = EuroBert(
    vocab_size=V, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=T,
)  # fmt: skip


def rows(count, real=T):
    """A batch [count, T] whose places from `real` on are padding, with every tenth token a 0."""
    tokens = np.random.default_rng(2).integers(4, V, (count, T))
    tokens[:, ::10] = 0
    inside = np.broadcast_to(np.arange(T) < real, tokens.shape)
    positions = np.broadcast_to(np.arange(T), tokens.shape)
    arrays = (tokens * inside, inside.astype(int), positions * inside, inside.astype(np.float32))
    return Batch(*map(jnp.asarray, arrays))


def keys(count):
    return jax.random.split(jax.random.key(1), count)


def test_an_exact_share_of_the_real_tokens_is_hidden():
    objective = Mlm(mask_token_id=MASK, mask_ratio=0.3, never_masked=(0,))
    for real, given in ((T, 0), (33, 5), (7, 0), (2, 0), (1, 0)):
        batch = rows(64, real)
        batch = replace(batch, loss_weight=batch.loss_weight * (batch.positions >= given))
        hidden = jax.jit(objective.hide, static_argnums=1)(batch, V, keys(64))
        hidden = jax.tree.map(np.asarray, hidden)
        batch = jax.tree.map(np.asarray, batch)
        candidates = (batch.loss_weight > 0) & (batch.tokens != 0)
        wanted = np.maximum(np.round(0.3 * candidates.sum(1)), candidates.any(1))
        np.testing.assert_array_equal(hidden.predicted.sum(1), wanted)
        changed = np.asarray(hidden.tokens != batch.tokens)
        assert np.all(np.asarray(hidden.tokens)[changed] == MASK) and not changed[~candidates].any()
        np.testing.assert_array_equal(changed.sum(1), wanted)
        chosen = [set(np.asarray(p)[np.asarray(n) > 0]) for p, n in zip(*hidden[1:], strict=True)]
        assert chosen == [set(np.flatnonzero(row)) for row in changed]
    every = Mlm(mask_token_id=MASK, mask_ratio=1.0).hide(rows(2), V, keys(2))
    assert np.all(np.asarray(every.tokens) == MASK) and every.places.shape == (2, T)


def test_what_stands_for_a_hidden_token():
    """Shares as set, within five standard deviations; each place is as likely as another."""
    count = 1000
    objective = Mlm(mask_token_id=MASK, mask_ratio=0.5, random_share=0.2, kept_share=0.3)
    batch = rows(count)
    hidden = jax.jit(lambda k: objective.hide(batch, V, k))(keys(count))
    old, new = np.asarray(batch.tokens), np.asarray(hidden.tokens)
    n = count * T // 2
    near = lambda found, share: abs(found - share * n) < 5 * (share * (1 - share) * n) ** 0.5  # noqa: E731
    assert near(np.sum(new == MASK), 0.5 + 0.2 / V)
    assert near(np.sum((new != old) & (new != MASK)), 0.2 * (1 - 1.8 / V))
    picked = np.zeros((count, T))
    np.put_along_axis(picked, np.asarray(hidden.places), np.asarray(hidden.predicted), axis=1)
    assert np.all(np.abs(picked.mean(0) - 0.5) < 5 * 0.5 / count**0.5)


def test_the_loss_is_that_of_the_whole_head():
    objective = Mlm(mask_token_id=MASK, mask_ratio=0.3, kept_share=0.1)
    w, batch = init_weights(MODEL.spec(), jax.random.key(0)), rows(3, 31)
    weights = np.array([[1.0], [2.0], [0.5]])
    batch = replace(batch, loss_weight=batch.loss_weight * weights)
    compute = Compute(loss_chunk_tokens=5)
    found = jax.jit(lambda w: objective.loss(MODEL, w, batch, keys(3), compute))(w)
    hidden = jax.jit(lambda batch: objective.hide(batch, V, keys(3)))(batch)
    seen = replace(batch, tokens=hidden.tokens)
    x = jax.jit(lambda w, seen: MODEL.hidden(w, seen, Compute())[0])(w, seen)
    each = optax.softmax_cross_entropy_with_integer_labels(MODEL.logits(w, x), batch.tokens)
    chosen = np.zeros((3, T))
    np.put_along_axis(chosen, np.asarray(hidden.places), np.asarray(hidden.predicted), axis=1)
    np.testing.assert_allclose(found.total, np.sum(each * chosen * weights), rtol=1e-5)
    assert chosen.sum() == 3 * round(0.3 * 31)
    assert float(found.weight) == np.sum(chosen * weights)


@pytest.mark.parametrize("microbatches, devices", [(2, 1), *CUTS[1:]])
def test_the_same_tokens_are_hidden_however_a_batch_is_cut(microbatches, devices):
    """Updated weights of a step."""

    after = partial(after_step, MODEL, Mlm(mask_token_id=MASK, mask_ratio=0.4))
    (plain, one), (other, two) = after(1, 1), after(microbatches, devices)
    assert jax.tree.map(float, one["target_tokens"]) == jax.tree.map(float, two["target_tokens"])
    for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_held_out_rows_hide_the_same_tokens_each_time():
    objective = Mlm(mask_token_id=MASK, mask_ratio=0.5, eval_mask_ratio=0.15)
    w = init_weights(MODEL.spec(), jax.random.key(0))
    batch = rows(6)
    plain = {name: np.asarray(getattr(batch, name)) for name in Batch.__dataclass_fields__}
    plain["text_bytes"] = np.ones((6, T))

    def measured(cuts):
        pieces = [{n: a[cut] for n, a in plain.items()} for cut in cuts]
        return evaluate_rows(MODEL, objective, Compute(), w, "rows", pieces)

    whole, cut = measured([slice(0, 6)]), measured([slice(0, 2), slice(2, 6)])
    assert whole.tokens == cut.tokens == 6 * round(0.15 * T)
    assert whole.bits_per_byte is None
    np.testing.assert_allclose(whole.loss, cut.loss, rtol=1e-6)
    hidden = objective.for_eval()
    at = hidden.hide(batch, V, hidden.keys(batch, jax.random.key(0))).places
    assert len({tuple(np.sort(row)) for row in np.asarray(at)}) == 6  # not the same in every row


@pytest.mark.parametrize("asked", ["text", "positions", "decoding"])
def test_next_tokens_are_not_asked_of_an_encoder(asked):
    """It sees them: their loss would say nothing."""
    w = init_weights(MODEL.spec(), jax.random.key(0))
    with pytest.raises(UserError, match="'eurobert' is an encoder, which predicts no next tokens"):
        if asked == "text":
            evaluate_text(MODEL, w, range(4, 30), context=8)
        elif asked == "positions":
            position_losses(MODEL, Compute(), w, "rows", [], T)
        else:
            decode_compute(MODEL, w, 4)


def test_the_head_works_for_the_hidden_tokens_alone():
    """With EuroBERT 210m's shape, a step takes more than 15 % less than with the whole head."""
    from lmwright.presets.encoders import PRESETS

    model = PRESETS["eurobert-210m"]()
    work = Mlm(mask_ratio=0.5).works(model, 2048)[""]
    whole = model.work(2048)
    head = 6 * 768 * 128_256
    saved = whole.flops_per_token() - work.flops_per_token()
    np.testing.assert_allclose(saved, head / 2, rtol=1e-9)
    assert saved > 0.15 * whole.flops_per_token()
    assert whole.attention.keys(2048) == 12 * 2048


def test_a_plan_counts_the_head_at_the_hidden_tokens(tmp_path):
    """Its products and logits take half the time at half the tokens, and nothing else changes."""
    ways = [f"objective.mask_ratio={ratio}" for ratio in (0.5, 1.0)]
    given = ["data.pack.seq_len=2048", "train.global_batch_size=64"]
    half, whole = (
        Quick.of(
            subject("eurobert-210m", [*given, way], "v5e-8")[0],
            parse_machine("v5e-8"),
        )
        for way in ways
    )
    tokens = whole.plan.tokens_per_step
    by_part = [quick.timing.by_part for quick in (half, whole)]
    assert by_part[0]["head"] == pytest.approx(by_part[1]["head"] / 2)
    assert by_part[0]["mlp"] == by_part[1]["mlp"]
    vector = [quick.timing.by_kind["vector"] for quick in (half, whole)]
    logits = LOGITS_PASSES * tokens / 8 * 128_256 * 4
    saved = logits / 2 / parse_machine("v5e-8").vector_bytes_per_s
    assert vector[1] - vector[0] == pytest.approx(saved, rel=1e-6)


class Tokens:
    """A tokenizer's special tokens."""

    def __init__(self, special, mask=None):
        self.special_tokens, self.mask = special, mask
        self.mask_id = special.get(mask)


def test_ids_come_from_the_tokenizer():
    special = {"<eos>": 7, "<mask>": 9}
    found = Mlm().with_tokenizer(Tokens(special, "<mask>"))
    assert (found.mask_token_id, found.never_masked) == (9, (7, 9))
    assert Mlm(mask_token_id=9, never_masked=()).with_tokenizer(
        Tokens(special, "<mask>")
    ).never_masked == ()  # fmt: skip
    assert Mlm(mask_token_id=7).with_tokenizer(Tokens(special)).mask_token_id == 7
    with pytest.raises(UserError, match=r"mask_token_id: 8 is not .* '<mask>'; .* set 9"):
        Mlm(mask_token_id=8).with_tokenizer(Tokens(special, "<mask>"))
    for objective in (Mlm(), Mlm(mask_token_id=3)):
        with pytest.raises(UserError, match=r"has no mask token; prepare with '<\|mask\|>'"):
            objective.with_tokenizer(Tokens(special))
    with pytest.raises(UserError, match="are more than all masked tokens"):
        Mlm(random_share=0.6, kept_share=0.5)
