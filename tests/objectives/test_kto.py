"""KTO against trl's trainer, on packed rows against rows of one conversation."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.leaves import Lora, has_adapters
from lmwright.core.sharding import make_mesh, mesh_shape
from lmwright.errors import UserError
from lmwright.evals.held_out import HeldOut
from lmwright.evals.loss import tally_of
from lmwright.evals.source_loss import SourceLoss
from lmwright.objectives.answers import Predictions, log_ratios
from lmwright.objectives.kto import Kto, rotate
from tests.objectives.answers_problem import gradients_of, logits, loss_of, weights

# (tokens of the prompt, of the answer, liked) of each conversation, row by row
ROWS = (((4, 5, True), (6, 7, False), (3, 8, True)), ((5, 4, False), (2, 9, False)))


def conversations(rows=ROWS):
    """Rows of (prompt ids, answer ids, liked)."""
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, 37, n)  # noqa: E731
    return [[(ids(asked), ids(said), liked) for asked, said, liked in row] for row in rows]


def packed(rows, length=48):
    made = {name: np.zeros((len(rows), length), np.int32) for name in "tipw"}
    for r, row in enumerate(rows):
        at = 0
        for number, (asked, said, liked) in enumerate(row, 1):
            size = len(asked) + len(said)
            here = slice(at, at + size)
            at += size
            made["t"][r, here] = np.concatenate([asked, said])
            made["i"][r, here], made["p"][r, here] = number, np.arange(size)
            made["w"][r, here] = np.arange(size) >= len(asked)
            made["w"][r, here.start] = liked
    return Batch(*(jnp.asarray(made[n]) for n in "tip"), jnp.asarray(made["w"], jnp.float32))


def mixed(rows):
    """The same prompts, with the answer of the conversation before."""
    return [
        [(asked, row[i - 1][1], liked) for i, (asked, _, liked) in enumerate(row)] for row in rows
    ]


def test_rotated_rows_hold_the_same_prompts_with_other_answers():
    rows = conversations(((*ROWS[0],), (*ROWS[1],), ((3, 4, True),)))
    got, want = rotate(packed(rows)), packed(mixed(rows))
    for name in ("tokens", "segment_ids", "positions", "loss_weight"):
        real = np.asarray(want.segment_ids) > 0
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        np.testing.assert_array_equal(a[real], b[real], err_msg=name)
    np.testing.assert_array_equal(got.segment_ids, want.segment_ids)


def test_what_follows_an_answer_moves_with_it():
    batch = packed(conversations())
    weight = batch.loss_weight.at[0, 8].set(0.0)  # the last token of the first answer
    moved = jax.jit(rotate)(Batch(batch.tokens, batch.segment_ids, batch.positions, weight))
    # prompt 2 begins after prompt 1 and answer 3, and has the first answer
    begins = 4 + 8
    learned = np.asarray(moved.loss_weight)[0, begins + 6 : begins + 6 + 5]
    assert learned.tolist() == [1, 1, 1, 1, 0]


def by_trl(rows, w, base, beta, kind, heavy):
    """The loss that trl's KTOTrainer takes of the same logits."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl").KTOTrainer
    flat = [c for row in rows for c in row]
    other = [c for row in mixed(rows) for c in row]
    longest = max(len(a) + len(b) for a, b, _ in flat + other)

    def tensors(found):
        tokens = torch.zeros((len(found), longest), dtype=torch.long)
        said = torch.zeros_like(tokens)
        logps = {id(w): torch.zeros(tokens.shape), id(base): torch.zeros(tokens.shape)}
        for i, (asked, answer, _) in enumerate(found):
            ids = np.concatenate([asked, answer])
            tokens[i, : len(ids)], said[i, len(asked) : len(ids)] = torch.tensor(ids), 1
            for which in (w, base):
                scores = torch.log_softmax(torch.tensor(logits(which, ids)), -1)
                places = torch.arange(len(asked) - 1, len(ids) - 1)
                logps[id(which)][i, len(asked) : len(ids)] = scores[places, torch.tensor(answer)]
        return tokens, said, logps

    tokens, said, logps = tensors(flat)
    _, _, other_logps = tensors(other)

    def model(**_):
        zeros = torch.zeros(tokens.shape)
        return SimpleNamespace(log_probs=logps[id(w)], entropy=zeros, mean_logits=zeros)

    self = MagicMock()
    self.aux_loss_enabled, self.calculate_KL = False, kind == "kto"
    self.precompute_ref_logps, self.loss_type, self.beta = True, kind.replace("-", "_"), beta
    self.desirable_weight, self.undesirable_weight = heavy
    self.accelerator.gather_for_metrics, self.accelerator.device = lambda a: a, "cpu"
    self._total_train_tokens, self._tp_size = 0, 1
    self._compute_kl_logps = lambda *_: other_logps[id(w)].sum(1)
    inputs = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": said,
        "label": torch.tensor([liked for _, _, liked in flat]),
        "ref_logps": logps[id(base)].sum(1), "ref_KL_logps": other_logps[id(base)].sum(1),
    }  # fmt: skip
    return float(trainer._compute_loss(self, model, inputs, False))


def run(objective, w, rows):
    return loss_of(objective, w, packed(rows), Compute(loss_chunk_tokens=7))


@pytest.mark.parametrize("kind", ["kto", "apo-zero-unpaired"])
def test_it_equals_trl(kind):
    base, w = weights()
    rows = conversations()
    objective = Kto(beta=0.3, loss_kind=kind, desirable_weight=1.3, undesirable_weight=0.6)
    loss = run(objective, w, rows)
    assert float(loss.weight) == 5
    want = by_trl(rows, w, base, 0.3, kind, (1.3, 0.6))
    np.testing.assert_allclose(float(loss.total) / 5, want, rtol=2e-5)


def test_the_reference_point_is_not_always_at_its_floor():
    """Otherwise the test above would not see it."""
    _, w = weights()
    points = [
        float(run(Kto(), use, conversations()).metrics["reference_point"][0])
        for use in (w, {**w, "layers": w["layers"] | negated(w)})
    ]
    assert max(points) > 0.01


def negated(w):
    return {
        name: Lora(leaf.base, leaf.a, -leaf.b)
        for name, leaf in w["layers"].items()
        if isinstance(leaf, Lora)
    }


def test_gradients_reach_adapters_alone_and_start_where_nothing_moved():
    base, w = weights()
    batch = packed(conversations())
    for objective in (Kto(), Kto(loss_kind="apo-zero-unpaired")):
        grads = gradients_of(objective, w, batch)
        adapter = grads["layers"]["up"]
        assert np.isfinite(adapter.a).all() and np.abs(adapter.a).max() > 0
        assert np.abs(adapter.base).max() == 0
    zero = {**w, "layers": dict(w["layers"])}
    for name in ("up", "down"):
        leaf = w["layers"][name]
        zero["layers"][name] = Lora(leaf.base, leaf.a, jnp.zeros_like(leaf.b))
    np.testing.assert_allclose(float(run(Kto(), zero, conversations()).total) / 5, 0.5, rtol=1e-6)
    with pytest.raises(UserError, match=r"compares with the base; add a .lora. section"):
        run(Kto(), base, conversations())


def test_an_answer_alone_in_its_row_says_nothing_of_the_reference_point():
    _, w = weights()
    alone = conversations((((4, 5, True),), ((3, 6, False),)))
    assert float(run(Kto(), w, alone).metrics["reference_point"][0]) == 0


def test_each_microbatch_of_a_pipeline_has_its_own_reference_point(monkeypatch):
    def told(model, w, batch, compute):
        """Stands for what a model says: its tokens."""
        learned = batch.loss_weight * (batch.positions > 0)
        return Predictions(0.01 * has_adapters(w) * batch.tokens, learned, learned, {})

    monkeypatch.setattr("lmwright.objectives.kto.predict_answers", told)
    _, w = weights()
    rows = conversations((*ROWS, *ROWS[::-1]))
    one, other = (run(Kto(beta=2.0), w, rows[i::2]) for i in (0, 1))
    points = [loss.metrics["reference_point"][0] / loss.weight for loss in (one, other)]
    assert abs(points[0] - points[1]) > 0.01
    with jax.set_mesh(make_mesh(mesh_shape(Mesh(stage=2), 2), jax.devices()[:2])):
        both = loss_of(Kto(beta=2.0), w, packed(rows), Compute(num_microbatches=2))
    for got, *parts in zip(*map(jax.tree.leaves, (both, one, other)), strict=True):
        np.testing.assert_allclose(got, sum(parts), rtol=1e-5)


def test_held_out_accuracy_is_that_of_all_answers():
    """The loss is that of liked answers alone, which are fewer."""
    _, w = weights()
    metrics = run(Kto(), w, conversations()).metrics
    tally = tally_of(Kto())
    for _ in range(2):
        tally.add({"loss_weight": np.ones(3), "text_bytes": np.ones(3)}, metrics)
    right, judged = metrics["accuracy"]
    assert float(judged) > float(metrics["nll"][1])
    assert tally.loss("x").accuracy == pytest.approx(float(right / judged))


def test_log_ratios_of_long_answers_keep_their_digits():
    """A sum of 4,000 log probabilities is rounded by more than what one step changes."""
    dice = np.random.default_rng(0)
    before = -dice.exponential(2.5, (1, 4000)).astype("f4")
    after = before + (1e-4 * dice.standard_normal(before.shape)).astype("f4")
    one = jnp.ones_like(before)
    policy, base = (Predictions(jnp.asarray(a), one, one, {}) for a in (after, before))
    found = log_ratios(policy, base, one.astype(int))[0, 1]
    want = (after.astype("f8") - before.astype("f8")).sum()
    assert float(found) == pytest.approx(want, rel=1e-5)


def test_a_source_without_liked_answers_has_no_loss(monkeypatch, capsys):
    held_out = object.__new__(HeldOut)
    held_out._store, held_out._told = SimpleNamespace(eval_sources=("bad", "good")), set()
    losses = {"bad": SourceLoss("bad", 0.0, 0.0, 0), "good": SourceLoss("good", 2.0, 0.5, 7)}
    monkeypatch.setattr(HeldOut, "_loss", lambda self, _, source: losses[source])
    for _ in range(2):
        assert held_out.losses({}) == [losses["good"]]
    assert capsys.readouterr().err.count("held out from bad: nothing that a loss is") == 1
