"""Schedules against transformers at every step, and their errors."""

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from lmwright.errors import UserError
from lmwright.optim.build import make_schedule
from lmwright.optim.kinds import (
    AdamW,
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Linear,
    Schedule,
    TwoStage,
    Wsd,
)

PEAK = 3e-3


def ours(schedule, total):
    rate = make_schedule(AdamW(learning_rate=PEAK, schedule=schedule), total)
    return np.asarray(rate(np.arange(total + 1)))


def theirs(make, total, **said):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, **said)
    rates = []
    for _ in range(total + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine(warmup, floor):
    want = theirs(
        get_cosine_with_min_lr_schedule_with_warmup,
        40,
        num_warmup_steps=warmup,
        num_training_steps=40,
        min_lr_rate=floor,
    )
    got = ours(Cosine(warmup_steps=warmup, floor_fraction=floor), 40)
    np.testing.assert_allclose(got, want, atol=1e-6 * PEAK)


@pytest.mark.parametrize("warmup", [0, 7])
def test_linear(warmup):
    said = dict(num_warmup_steps=warmup, num_training_steps=40)
    want = theirs(get_linear_schedule_with_warmup, 40, **said)
    got = ours(Linear(warmup_steps=warmup), 40)
    np.testing.assert_allclose(got, want, atol=1e-6 * PEAK)


def test_linear_with_floor_is_a_line_between_its_ends():
    got = ours(Linear(warmup_steps=8, floor_fraction=0.25), 40)
    np.testing.assert_allclose(got[8:], np.linspace(PEAK, PEAK / 4, 33), rtol=1e-6)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_wsd(shape, floor):
    """Theirs warms up from the floor, ours from zero: compared from the end of the warm-up."""
    want = theirs(
        get_wsd_schedule,
        50,
        num_warmup_steps=6,
        num_decay_steps=15,
        num_training_steps=50,
        decay_type=shape,
        min_lr_ratio=floor,
    )
    got = ours(Wsd(warmup_steps=6, decay_steps=15, shape=shape, floor_fraction=floor), 50)
    np.testing.assert_allclose(got[6:], want[6:], atol=1e-6 * PEAK)
    np.testing.assert_allclose(got[:7], PEAK * np.arange(7) / 6, rtol=1e-6)


def test_wsd_square_root():
    got = ours(Wsd(warmup_steps=6, decay_steps=15, shape="sqrt", floor_fraction=0.2), 50)
    fall = 1 - np.sqrt(np.arange(16) / 15)
    np.testing.assert_allclose(got[35:], PEAK * (0.2 + 0.8 * fall), rtol=1e-5)
    np.testing.assert_allclose(got[6:36], PEAK, rtol=1e-6)


def test_constant_and_inverse_sqrt():
    want = theirs(get_constant_schedule_with_warmup, 30, num_warmup_steps=4)
    np.testing.assert_allclose(ours(Constant(warmup_steps=4), 30), want, rtol=1e-6)
    want = theirs(get_inverse_sqrt_schedule, 90, num_warmup_steps=9)
    np.testing.assert_allclose(ours(InverseSqrt(warmup_steps=9), 90), want, rtol=1e-6)


@pytest.mark.parametrize("cooldown", [0, 12])
def test_exponential(cooldown):
    """As optax joins it of three pieces."""
    last = 50 - cooldown
    want = optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK, 6),
            optax.exponential_decay(PEAK, last - 6, 0.2, end_value=0.2 * PEAK),
            optax.linear_schedule(0.2 * PEAK, 0.0 if cooldown else 0.2 * PEAK, max(cooldown, 1)),
        ],
        [6, last],
    )
    got = ours(Exponential(warmup_steps=6, floor_fraction=0.2, cooldown_steps=cooldown), 50)
    np.testing.assert_allclose(got, want(np.arange(51)), atol=1e-6 * PEAK)


def test_two_stage():
    """As optax joins it of three lines."""
    lines = [(0.0, 1.0, 6), (1.0, 0.7, 14), (0.4, 0.1, 30)]  # from, to, steps; the second at 20
    pieces = [optax.linear_schedule(a * PEAK, b * PEAK, n) for a, b, n in lines]
    said = {"first_floor_fraction": 0.7, "second_fraction": 0.4, "floor_fraction": 0.1}
    got = ours(TwoStage(warmup_steps=6, switch_fraction=0.4, **said), 50)
    want = optax.join_schedules(pieces, [6, 20])(np.arange(51))
    np.testing.assert_allclose(got, want, atol=1e-6 * PEAK)


@pytest.mark.parametrize(
    "schedule",
    [
        Exponential(warmup_steps=29, cooldown_steps=11),
        Cosine(warmup_steps=40),
        Linear(warmup_steps=41),
        Wsd(warmup_steps=30, decay_steps=11),
        TwoStage(warmup_steps=16, switch_fraction=0.4),
    ],
)
def test_what_does_not_fit_is_an_error(schedule):
    with pytest.raises(UserError, match=r"optim\.schedule\.warmup_steps.*train\.steps = 40"):
        make_schedule(AdamW(learning_rate=1e-3, schedule=schedule), 40)


schedules = st.one_of(
    st.builds(Constant, warmup_steps=st.integers(0, 20)),
    st.builds(Linear, warmup_steps=st.integers(0, 20), floor_fraction=st.floats(0, 1)),
    st.builds(Cosine, warmup_steps=st.integers(0, 20), floor_fraction=st.floats(0, 1)),
    st.builds(InverseSqrt, warmup_steps=st.integers(1, 20)),
    st.builds(
        Wsd,
        warmup_steps=st.integers(0, 20),
        decay_steps=st.integers(1, 20),
        shape=st.sampled_from(["linear", "cosine", "sqrt"]),
        floor_fraction=st.floats(0, 1),
    ),
)


@settings(max_examples=20, deadline=None)
@given(schedule=schedules, total=st.integers(41, 60))
def test_rises_to_the_peak_then_never_rises(schedule, total):
    rate = make_schedule(AdamW(learning_rate=PEAK, schedule=schedule), total)
    rates = np.asarray(rate(np.arange(total + 5)))
    warmup = schedule.warmup_steps
    assert np.all(np.diff(rates[: warmup + 1]) > 0)
    assert np.all(np.diff(rates[warmup:]) <= 1e-9)
    np.testing.assert_allclose(rates[warmup], PEAK, rtol=1e-6)
    assert rates.min() >= 0
    floor = getattr(schedule, "floor_fraction", None)
    if floor is not None:
        np.testing.assert_allclose(rates[total:], PEAK * floor, atol=1e-6 * PEAK)


@pytest.mark.parametrize(
    "schedule",
    [
        Exponential(warmup_steps=28, cooldown_steps=11),
        Cosine(warmup_steps=39),
        Constant(warmup_steps=40),
        Wsd(warmup_steps=30, decay_steps=10),
        TwoStage(warmup_steps=15, switch_fraction=0.4),
    ],
)
def test_what_just_fits_has_a_number_at_each_step(schedule):
    assert np.isfinite(got := ours(schedule, 40)).all() and got.max() == np.float32(PEAK)


def test_traces_and_takes_an_int32_step():
    rate = make_schedule(AdamW(learning_rate=PEAK, schedule=Cosine(warmup_steps=5)), 50)
    out = jax.eval_shape(rate, jax.ShapeDtypeStruct((), "int32"))
    assert out.shape == () and out.dtype == "float32"


def test_chosen_by_kind():
    read = TypeAdapter(Schedule).validate_python
    assert read({"kind": "wsd", "decay_steps": 3}) == Wsd(decay_steps=3)
    with pytest.raises(ValueError, match="decay_steps"):
        read({"kind": "wsd"})
