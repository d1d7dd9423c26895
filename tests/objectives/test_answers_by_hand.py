"""Losses of answers whose log probabilities are told outright, by the formulas of the papers."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.leaves import has_adapters
from lmwright.objectives.answers import Predictions
from lmwright.objectives.kto import Kto
from lmwright.objectives.preference import Answers, Dpo
from tests.objectives.answers_problem import loss_of, weights
from tests.objectives.test_kto import ROWS, conversations, mixed, packed


def pairs():
    """Answers of a row of two pairs and of one with one, and their log ratios [B, P]."""
    rng = np.random.default_rng(0)
    tokens, others = np.array([[5, 3], [7, 0]], "f4"), np.array([[4, 9], [2, 0]], "f4")
    logps = [-rng.exponential(3, (2, 2)).astype("f4") * (tokens > 0) for _ in range(2)]
    ratios = [rng.normal(0, 4, (2, 2)).astype("f4") * (tokens > 0) for _ in range(2)]
    whole = -rng.exponential(5, (2, 2)).astype("f4"), tokens + 4
    return Answers(*map(jnp.asarray, (*logps, tokens, others, *whole))), ratios


@pytest.mark.parametrize("kind", ["ipo", "hinge"])
def test_pairs_by_other_losses(kind):
    """IPO's equation 17, over means of tokens as trl has it, and SLiC's equation 1."""
    said, (chosen, rejected) = pairs()
    loss = Dpo(beta=0.2, loss_kind=kind).of(said, *map(jnp.asarray, (chosen, rejected)))
    there = np.asarray(said.chosen_tokens) > 0
    apart = chosen - rejected
    each = np.maximum(0, 1 - 0.2 * apart)
    if kind == "ipo":
        most = [np.maximum(a, 1) for a in (said.chosen_tokens, said.rejected_tokens)]
        each = (chosen / most[0] - rejected / most[1] - 1 / (2 * 0.2)) ** 2
    assert (each[there] > 0).any() and float(loss.weight) == 3
    assert float(loss.total) == pytest.approx(each[there].sum(), rel=1e-5)
    right = (apart > 0) & there
    shares = {
        "reward_accuracy": right.sum() / 3,
        "reward_margin": 0.2 * apart[there].mean(),
        "accuracy": np.asarray(said.chosen_tokens)[right].sum() / (5 + 3 + 7),
        "nll": -np.asarray(said.chosen)[there].sum() / (5 + 3 + 7),
    }
    for name, share in shares.items():
        total, count = loss.metrics[name]
        assert float(total / count) == pytest.approx(share, rel=1e-5), name


def rated(objective, rows, monkeypatch, compute=Compute(), share=0.01):  # noqa: B008
    """The loss of rows where a model says a share of its token for each, if it has adapters."""

    def told(model, w, batch, compute):
        learned = batch.loss_weight * (batch.positions > 0)
        return Predictions(share * has_adapters(w) * batch.tokens, learned, learned, {})

    monkeypatch.setattr("lmwright.objectives.kto.predict_answers", told)
    return loss_of(objective, weights()[1], packed(rows), compute)


def ratios_of(rows):
    """The log ratio of each answer to a share of 0.01, and whether it was liked."""
    return [(0.01 * said.sum(), liked) for row in rows for _, said, liked in row]


def by_hand(rows, point, beta):
    """KTO's equation 8 with weights 1.3 and 0.6."""
    total = 0.0
    for ratio, liked in ratios_of(rows):
        sign = 1 if liked else -1
        share = 1 / (1 + np.exp(-beta * sign * (ratio - point)))
        total += (1.3 if liked else 0.6) * (1 - share)
    return total


@pytest.mark.parametrize("kind", ["kto", "apo-zero-unpaired"])
def test_rated_answers(kind, monkeypatch):
    """The row whose answer is alone has no other prompt, and no say in the reference point."""
    rows = conversations((*ROWS, ((3, 40, True),)))
    moved = [ratio for ratio, _ in ratios_of(mixed(rows[:2]))]
    point = np.mean(moved) if kind == "kto" else 0.0
    objective = Kto(beta=1.5, loss_kind=kind, desirable_weight=1.3, undesirable_weight=0.6)
    loss = rated(objective, rows, monkeypatch)
    total, count = loss.metrics["reference_point"]
    assert float(total / count) == pytest.approx(point, rel=1e-5) and float(count) == 6
    assert float(loss.total) == pytest.approx(by_hand(rows, point, 1.5), rel=1e-5)
    signs = [1 if liked else -1 for _, liked in ratios_of(rows)]
    sizes = [said.size for row in rows for _, said, _ in row]
    above = [s * (r - point) > 0 for s, (r, _) in zip(signs, ratios_of(rows), strict=True)]
    right, judged = loss.metrics["accuracy"]
    assert float(right) == np.dot(above, sizes) and float(judged) == sum(sizes)
    for name, of in (("reward_chosen", True), ("reward_rejected", False)):
        total, count = loss.metrics[name]
        want = 1.5 * np.mean([ratio for ratio, liked in ratios_of(rows) if liked is of])
        assert float(total / count) == pytest.approx(want, rel=1e-5)


def test_the_reference_point_is_not_below_zero(monkeypatch):
    """Where answers have become less likely, they are compared with the base as it is."""
    loss = rated(Kto(beta=1.5), conversations(), monkeypatch, share=-0.01)
    assert float(loss.metrics["reference_point"][0]) == 0
    want = sum(
        1 / (1 + np.exp(1.5 * (1 if liked else -1) * -ratio))
        for ratio, liked in ratios_of(conversations())
    )
    assert float(loss.total) == pytest.approx(want, rel=1e-5)


def test_microbatches_of_a_pipeline_have_reference_points_of_their_own(monkeypatch):
    monkeypatch.setattr("lmwright.objectives.kto.num_stages", lambda: 2)
    rows = conversations((*ROWS, *ROWS[::-1]))
    objective = Kto(beta=1.5, desirable_weight=1.3, undesirable_weight=0.6)
    loss = rated(objective, rows, monkeypatch, Compute(num_microbatches=2))
    want = 0.0
    for own in (rows[0::2], rows[1::2]):
        want += by_hand(own, np.mean([ratio for ratio, _ in ratios_of(mixed(own))]), 1.5)
    assert float(loss.total) == pytest.approx(want, rel=1e-5)
    held_out = rated(objective.for_eval(), rows, monkeypatch, Compute(num_microbatches=2))
    point = np.mean([ratio for ratio, _ in ratios_of(mixed(rows))])
    assert float(held_out.total) == pytest.approx(by_hand(rows, point, 1.5), rel=1e-5)
