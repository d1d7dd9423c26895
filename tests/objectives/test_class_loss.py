"""Weights of classes and smoothed targets beside torch's loss, from logits."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.section import validate
from lmwright.core.contract import Batch
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.objectives.class_loss import judged_classes
from lmwright.objectives.classify import Classify
from lmwright.objectives.documents import Scored
from lmwright.objectives.multilabel import Multilabel
from lmwright.objectives.tag import Tag

torch = pytest.importorskip("torch", reason="torch is the reference")

WEIGHTS = (0.3, 1.0, 4.0, 2.0)


@pytest.mark.parametrize("weights", [(), WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradient_are_those_of_torch(weights, smoothing):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (3, 7, 4)).astype(np.float32)
    real, there = rng.integers(0, 4, (3, 7)), rng.random((3, 7)) < 0.6
    dense = SimpleNamespace(mixtures={})

    def loss(logits):
        made = judged_classes(dense, Aux(), logits, real, 1.0 * there, weights, smoothing).loss
        return made.total / made.weight, made.metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logits))
    given = torch.tensor(logits, requires_grad=True)
    target = torch.tensor(np.where(there, real, -100))
    both = given.flatten(0, 1), target.flatten()
    wanted = torch.nn.functional.cross_entropy(
        *both, torch.tensor(weights) if weights else None, label_smoothing=smoothing
    )
    wanted.backward()
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad, atol=1e-6)
    plain = torch.nn.functional.cross_entropy(*both)  # what evaluations measure
    np.testing.assert_allclose(metrics["nll"][0] / metrics["nll"][1], plain.item(), rtol=1e-5)


def test_classes_that_are_likelier_than_not_are_given(monkeypatch):
    """Those with a logit above 0; a text is right with all of its classes."""
    scores = jnp.asarray([[[0.2, -0.2, 3.0], [0.1, 0.4, -2.0], [9.0, 9.0, 9.0]]])
    bits = jnp.asarray([[5.0, 2.0, 0.0]])  # classes a and c; class b
    ids = jnp.asarray([[1, 2, 0]])  # two texts of a token, and padding
    batch = Batch(ids, ids, jnp.zeros((1, 3), jnp.int32), bits)
    scored = Scored(scores, bits, jnp.asarray([[1.0, 1.0, 0.0]]), Aux())
    monkeypatch.setattr(Multilabel, "scored", lambda *_: scored)
    monkeypatch.setattr(Multilabel, "model_over", lambda *_: SimpleNamespace(mixtures={}))
    made = Multilabel(labels=("a", "b", "c")).judged(None, {}, batch, None)
    np.testing.assert_array_equal(made.given[0, :2], [[1, 0, 1], [1, 1, 0]])
    assert [float(part) for part in made.loss.metrics["accuracy"]] == [1.0, 2.0]


@pytest.mark.parametrize(
    "kind, field",
    [(Classify, "class_weights"), (Tag, "class_weights"), (Multilabel, "positive_weights")],
)
def test_what_is_refused(kind, field):
    with pytest.raises(UserError, match=f"objective.{field}: 1 weights for 2 labels; write one"):
        kind(labels=("O", "B-PER"), **{field: (2.0,)})
    said = {"labels": ["O", "B-PER"], field: [1.0, 0.0]}
    with pytest.raises(UserError, match=field):
        validate(kind, said, "objective.")
