"""Shares of masked language modeling that move during a run."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.objectives.mlm import Mlm, RowKeys
from lmwright.objectives.ramp import TIE, Ramp
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.objectives.test_mlm import MASK, MODEL, T, V, keys, rows
from tests.train.test_step import SEQ_LEN, make_batch, make_run, model_of

STEPS = 6
FALLING = {"mask_ratio": Ramp(start=0.6, end=0.1), "random_share": Ramp(start=0.0, end=0.2)}


def at(ramp, k, steps):
    """The share at a step, by interpolation between its corners."""
    corners = [0.0, ramp.after, ramp.until, 1.0]
    return np.interp(k / steps, corners, [ramp.start, ramp.start, ramp.end, ramp.end])


@pytest.mark.parametrize(
    "ramp",
    [Ramp(start=0.5, end=0.1), Ramp(start=0.15, end=0.4, after=0.25, until=0.75)],
)
def test_a_share_follows_a_line(ramp):
    steps = 40
    found = [float(ramp.at(jnp.float32(k / steps))) for k in range(steps)]
    np.testing.assert_allclose(found, [at(ramp, k, steps) for k in range(steps)], rtol=1e-6)


def test_a_share_may_jump():
    ramp = Ramp(start=0.3, end=0.05, after=0.9, until=0.9)
    found = [float(ramp.at(jnp.float32(k) / 20)) for k in range(20)]
    np.testing.assert_allclose(found, [0.3] * 18 + [0.05] * 2, rtol=1e-6)


def test_each_row_hides_the_rounded_share_of_the_moment():
    """In places whose number does not change."""
    ramp = Ramp(start=0.5, end=0.1)
    objective = Mlm(mask_token_id=MASK, mask_ratio=ramp)
    batch = rows(8, 37)
    hide = jax.jit(lambda done: objective.hide(batch, V, RowKeys(keys(8), done)))
    for k in (0, 3, 10, 19):
        hidden = hide(jnp.float32(k) / 20)
        assert hidden.places.shape == (8, T // 2)
        wanted = int(np.floor((at(ramp, k, 20) + TIE) * 37 + 0.5))
        np.testing.assert_array_equal(hidden.predicted.sum(1), wanted)
        changed = np.asarray(hidden.tokens != batch.tokens)
        np.testing.assert_array_equal(changed.sum(1), wanted)
        plain = replace(objective, mask_ratio=wanted / 37)
        same = jax.jit(lambda keys, plain=plain: plain.hide(batch, V, keys))(keys(8))
        np.testing.assert_array_equal(hidden.tokens, same.tokens)


def test_what_stands_for_a_token_moves_too():
    objective = Mlm(
        mask_token_id=MASK, mask_ratio=0.5, random_share=Ramp(start=0.0, end=0.4),
        kept_share=Ramp(start=0.6, end=0.2),
    )  # fmt: skip
    batch = rows(2000)
    old, n = np.asarray(batch.tokens), 2000 * T // 2
    hide = jax.jit(lambda done: objective.hide(batch, V, RowKeys(keys(2000), done)).tokens)
    for done, (random, kept) in ((0.0, (0.0, 0.6)), (0.5, (0.2, 0.4))):
        new = np.asarray(hide(jnp.float32(done)))
        share = 1 - random - kept + random / V
        assert abs(np.sum((new == MASK) & (old != MASK)) - share * n) < 5 * (n / 4) ** 0.5


@cache
def compiled(microbatches):
    """A run's plan, its step, and the batch of all steps."""
    run = make_run(num_microbatches=microbatches, steps=STEPS)
    objective = Mlm(mask_token_id=MASK, **FALLING)
    run = replace(run, model=replace(MODEL, seq_len=SEQ_LEN, vocab_size=64), objective=objective)
    whole = make_batch(replace(run, train=replace(run.train, num_microbatches=1)))
    deal = lambda a: a[0].reshape(-1, microbatches, SEQ_LEN).swapaxes(0, 1)  # noqa: E731
    plan = resolve(run, jax.devices()[:1])
    return plan, make_step(plan), jax.tree.map(deal, whole)


def trained(microbatches, steps, state=None):
    """The state after some steps, and the metrics of each."""
    plan, step, batch = compiled(microbatches)
    state = init_state(plan) if state is None else jax.device_put(state)
    metrics = []
    for _ in steps:
        state, values = step(state, batch)
        metrics.append(jax.tree.map(float, values))
    return jax.tree.map(np.asarray, state), metrics


@pytest.fixture(scope="module")
def straight():
    """The state and the metrics of a run without a stop."""
    return trained(1, range(STEPS))


def test_a_run_follows_its_steps(straight):
    """The masks of a step are those of its number, of real tokens alone."""
    run = make_run()
    real = (np.asarray(make_batch(run).loss_weight)[0] > 0).sum(1)
    shares = [at(FALLING["mask_ratio"], k, STEPS) + TIE for k in range(STEPS)]
    wanted = [np.floor(share * real + 0.5).sum() for share in shares]
    assert [values["target_tokens"] for values in straight[1]] == wanted
    assert wanted[0] > 3 * wanted[-1]


def test_a_stop_in_the_middle_changes_no_bit(straight):
    half, _ = trained(1, range(3))
    whole, metrics = trained(1, range(3, STEPS), half)
    assert metrics == straight[1][3:]
    jax.tree.map(np.testing.assert_array_equal, whole, straight[0])


@pytest.mark.parametrize("microbatches", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_microbatches_hide_the_same_tokens(straight, microbatches):
    state, metrics = trained(microbatches, range(STEPS))
    for ours, theirs in zip(metrics, straight[1], strict=True):
        assert ours["target_tokens"] == theirs["target_tokens"]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(model_of(s)["weights"]) for s in (state, straight[0])),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_held_out_rows_have_the_shares_of_the_end():
    plain = Mlm(mask_token_id=MASK, **FALLING).for_eval()
    assert (plain.mask_ratio, plain.random_share) == (0.1, 0.2)
    assert Mlm(**FALLING, eval_mask_ratio=0.15).for_eval().mask_ratio == 0.15


def test_the_head_works_for_the_largest_share():
    assert Mlm(**FALLING).works(MODEL, T)[""].active["head"] == 0.6


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"mask_ratio": Ramp(start=0.3, end=0.3)}, "objective.mask_ratio.end: 0.3 equals start"),
        ({"mask_ratio": Ramp(start=0.3, end=0)}, "objective.mask_ratio: at 0 nothing"),
        ({"kept_share": Ramp(start=0, end=0.1, after=0.5, until=0.2)},
         "objective.kept_share.until: 0.2 is less than after = 0.5"),
        ({"random_share": Ramp(start=0.1, end=0.6), "kept_share": 0.5}, "more than all masked"),
        ({"random_share": Ramp(start=0.9, end=0.1, until=0.5),
          "kept_share": Ramp(start=0.1, end=0.9)}, "more than all masked"),
    ],
)  # fmt: skip
def test_shares_that_cannot_be(settings, said):
    with pytest.raises(UserError, match=said):
        Mlm(**settings)
    Mlm(random_share=Ramp(start=0.9, end=0.1), kept_share=Ramp(start=0.1, end=0.9))
