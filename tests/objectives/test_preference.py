"""Losses over pairs against trl's trainers, on packed rows against rows of one conversation."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.leaves import Lora
from lmwright.errors import UserError
from lmwright.objectives.preference import Answers, Dpo, Orpo
from tests.objectives.answers_problem import gradients_of, logits, loss_of, weights

PROMPTS, LENGTHS = (4, 6, 3), ((5, 7), (8, 4), (6, 6))


def conversations(lengths=LENGTHS):
    """(prompt tokens, ids) of chosen and rejected in turn."""
    rng = np.random.default_rng(0)
    for prompt, pair in zip(PROMPTS, lengths, strict=True):
        asked = rng.integers(0, 37, prompt)
        for answer in pair:
            yield prompt, np.concatenate([asked, rng.integers(0, 37, answer)])


def packed(found, length=48):
    """Two rows: the first two pairs, and the last."""
    rows = {name: np.zeros((2, length), np.int32) for name in ("tokens", "ids", "places", "weight")}
    at, number = [0, 0], [0, 0]
    for i, (prompt, ids) in enumerate(found):
        row = int(i >= 4)
        number[row] += 1
        here = slice(at[row], at[row] + len(ids))
        at[row] += len(ids)
        rows["tokens"][row, here], rows["ids"][row, here] = ids, number[row]
        rows["places"][row, here] = np.arange(len(ids))
        rows["weight"][row, here] = np.arange(len(ids)) >= prompt
    return Batch(
        jnp.asarray(rows["tokens"]), jnp.asarray(rows["ids"]), jnp.asarray(rows["places"]),
        jnp.asarray(rows["weight"], jnp.float32),
    )  # fmt: skip


def by_trl(found, w, base, beta, kind):
    """The loss that trl's DPOTrainer takes of the same logits."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl").DPOTrainer
    order = found[0::2] + found[1::2]  # chosen first, rejected after, as trl's batches are
    longest = max(len(ids) for _, ids in order)
    tokens = torch.zeros((len(order), longest), dtype=torch.long)
    said = torch.zeros_like(tokens)
    logps = {id(w): torch.zeros(tokens.shape), id(base): torch.zeros(tokens.shape)}
    for i, (prompt, ids) in enumerate(order):
        tokens[i, : len(ids)] = torch.tensor(ids)
        said[i, prompt : len(ids)] = 1
        for which in (w, base):
            scores = torch.log_softmax(torch.tensor(logits(which, ids)), -1)
            rows = torch.arange(prompt - 1, len(ids) - 1)
            logps[id(which)][i, prompt : len(ids)] = scores[rows, torch.tensor(ids[prompt:])]
    half = len(order) // 2

    def model(**_):
        zeros = torch.zeros(tokens.shape)
        return SimpleNamespace(
            log_probs=logps[id(w)], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    reference = logps[id(base)].sum(1)
    self = MagicMock()
    self.aux_loss_enabled, self.ld_alpha, self.use_weighting = False, None, False
    self.precompute_ref_logps, self.f_divergence_type = True, "reverse_kl"
    self.loss_types, self.loss_weights, self.beta, self.label_smoothing = [kind], [1.0], beta, 0.0
    self.accelerator.gather_for_metrics = self.accelerator.gather = lambda a: a
    self._total_train_tokens, self._tp_size = 0, 1
    inputs = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": said,
        "ref_chosen_logps": reference[:half], "ref_rejected_logps": reference[half:],
    }  # fmt: skip
    return float(trainer._compute_loss(self, model, inputs, False))


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo_equals_trl(kind):
    base, w = weights()
    found = list(conversations())
    compute = Compute(loss_chunk_tokens=7)
    loss = loss_of(Dpo(beta=0.3, loss_kind=kind), w, packed(found), compute)
    assert float(loss.weight) == 3
    want = by_trl(found, w, base, 0.3, kind)
    np.testing.assert_allclose(float(loss.total) / 3, want, rtol=2e-5)


def test_orpo_equals_trl():
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    _, w = weights()
    # of one length, since trl's first term is a mean over all tokens of a batch
    lengths = tuple((9 - prompt, 4) for prompt in PROMPTS)
    found = list(conversations(lengths))
    loss = loss_of(Orpo(beta=0.4), w, packed(found))
    means, nll = [], []
    for prompt, ids in found:
        scores = torch.log_softmax(torch.tensor(logits(w, ids))[:-1], -1)
        each = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        means.append(each[prompt - 1 :].mean())
        nll.append(-each.mean())
    self = MagicMock()
    self.beta = 0.4
    self.accelerator.device = "cpu"
    chosen, rejected = torch.stack(means[0::2]), torch.stack(means[1::2])
    losses = trainer.odds_ratio_loss(self, chosen, rejected)[0]
    want = torch.stack(nll[0::2]).mean() - losses.mean()
    np.testing.assert_allclose(float(loss.total) / 3, float(want), rtol=2e-5)


def test_orpo_of_answers_that_are_nearly_certain():
    """The loss and its slope, as float64 has them."""
    chosen, rejected = np.array([-1e-6, -3e-5, -0.7]), np.array([-2e-6, -0.5, -1e-4])
    one = jnp.ones(3)

    def loss(chosen):
        rest = jnp.asarray(rejected, jnp.float32)
        return Orpo().of(Answers(chosen, rest, one, one, 0 * one, one)).total

    got, slope = jax.value_and_grad(loss)(jnp.asarray(chosen, jnp.float32))
    odds = lambda a: a - np.log(-np.expm1(a))  # noqa: E731
    apart = odds(chosen) - odds(rejected)
    np.testing.assert_allclose(got, 0.1 * np.log1p(np.exp(-apart)).sum(), rtol=1e-5)
    want = -0.1 / (1 + np.exp(apart)) / -np.expm1(chosen)
    np.testing.assert_allclose(slope, want, rtol=1e-4)


def test_gradients_reach_adapters_alone_and_are_finite():
    _, w = weights()
    batch = packed(list(conversations()))
    for objective in (Dpo(), Dpo(loss_kind="ipo"), Orpo()):
        grads = gradients_of(objective, w, batch)
        adapter = grads["layers"]["up"]
        assert np.isfinite(adapter.a).all() and np.abs(adapter.a).max() > 0
        assert np.abs(adapter.base).max() == 0


def test_at_the_start_it_is_log_2_and_smoothing_by_hand():
    base, w = weights()
    zero = {**w, "layers": dict(w["layers"])}
    for name in ("up", "down"):
        leaf = w["layers"][name]
        zero["layers"][name] = Lora(leaf.base, leaf.a, jnp.zeros_like(leaf.b))
    run = lambda o, w: loss_of(o, w, packed(list(conversations())))  # noqa: E731
    np.testing.assert_allclose(float(run(Dpo(), zero).total) / 3, np.log(2), rtol=1e-5)
    plain, smooth = run(Dpo(beta=0.5), w), run(Dpo(beta=0.5, label_smoothing=0.1), w)
    # -(1 - s) log sig(m) - s log sig(-m) = -log sig(m) + s m
    margin = float(plain.metrics["reward_margin"][0])
    np.testing.assert_allclose(float(smooth.total), float(plain.total) + 0.1 * margin, rtol=1e-5)
    with pytest.raises(UserError, match=r"compares with the base; add a .lora. section"):
        run(Dpo(), base)
