"""Text classification: losses do not depend on how documents are packed or a batch is cut."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from lmwright.config.section import validate
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.evals.loss import evaluate_rows
from lmwright.models.eurobert import EuroBert
from lmwright.models.llama import Llama
from lmwright.objectives.classify import Classify
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.objectives.labeled_rows import packed
from tests.train.test_step import SEQ_LEN, make_run, model_of

V, T, K = 50, SEQ_LEN, 3
MODEL = EuroBert(
    vocab_size=V, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=T,
)  # fmt: skip
POOLINGS = ("bos", "mean", "late")
LENGTHS = [5, 9, 3, 11, 24, 1, 7, 2, 6, 4, 8, 10, 13]


def objective(pooling=None):
    return Classify(labels=("a", "b", "c"), pooling=pooling)


def documents(lengths=LENGTHS):
    """(tokens, class) of each."""
    rng = np.random.default_rng(2)
    return [(rng.integers(0, V, n), int(rng.integers(0, K))) for n in lengths]


def in_rows(found, width=T):
    """Documents in rows of `width`, in their order."""
    rows, left = [], 0
    for document in found:
        if len(document[0]) > left:
            rows.append([])
            left = width
        rows[-1].append(document)
        left -= len(document[0])
    return rows


def weights(pooling="late"):
    w = init_weights(objective(pooling).spec(MODEL), jax.random.key(0))
    head = jax.random.split(jax.random.key(1), 2)
    w["classifier"]["dense_bias"] = 0.3 * jax.random.normal(head[0], (16,))
    w["classifier"]["out_bias"] = 0.3 * jax.random.normal(head[1], (K,))
    return w


def keys(count):
    return jax.random.split(jax.random.key(1), count)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_documents_are_as_alone(pooling):
    """Loss, right answers and every gradient."""
    w, chosen = weights(pooling), objective(pooling)

    def found(batch):
        def loss(w):
            made = chosen.loss(MODEL, w, batch, keys(len(batch.tokens)), Compute())
            return made.total, made

        (_, made), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
        return made, grads

    all_rows = in_rows(documents())
    assert max(map(len, all_rows)) > 2
    together, alone = found(packed(all_rows, T)), found(packed([[d] for d in documents()], T))
    assert float(together[0].weight) == float(alone[0].weight) == len(LENGTHS)
    np.testing.assert_allclose(together[0].total, alone[0].total, rtol=1e-5)
    np.testing.assert_allclose(*(made.metrics["accuracy"][0] for made, _ in (together, alone)))
    for ours, theirs in zip(*map(jax.tree.leaves, (together[1], alone[1])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(np.abs(theirs).max() + 1e-9))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_loss_is_that_of_pooling_written_out(pooling):
    """Each document by itself, pooled with numpy's own mean."""
    w, chosen = weights(pooling), objective(pooling)
    classifier, total = chosen.model_over(MODEL), 0.0
    hidden = jax.jit(lambda w, b: MODEL.hidden(w, b, Compute())[0])
    for text, label in documents():
        x = hidden(w, packed([[(text, label)]], T))[:, : len(text)]
        x = x[:, :1] if pooling == "bos" else x
        x = x.mean(1, keepdims=True) if pooling == "mean" else x
        logits = classifier.logits(w, x)[0].mean(0)
        total += optax.softmax_cross_entropy_with_integer_labels(logits, label)
    batch = packed(in_rows(documents()), T)
    loss = jax.jit(lambda w, b: chosen.loss(MODEL, w, b, keys(len(b.tokens)), Compute()))
    found = loss(w, batch)
    np.testing.assert_allclose(found.total, total, rtol=1e-5)


def test_rows_of_padding_alone_have_finite_gradients():
    w, batch = weights("mean"), packed([[], []], T)

    def loss(w):
        made = objective("mean").loss(MODEL, w, batch, keys(2), Compute())
        return made.total, made.weight

    (total, weight), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    assert total == 0 and weight == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def after(batch, microbatches, devices, chosen):
    run = make_run(num_microbatches=microbatches)
    run = replace(run, model=replace(MODEL, seq_len=SEQ_LEN), objective=chosen)
    # as the feed deals rows out
    deal = lambda a: a.reshape(-1, microbatches, SEQ_LEN).swapaxes(0, 1)  # noqa: E731
    plan = resolve(run, jax.devices()[:devices])
    with jax.set_mesh(plan.mesh):
        state, metrics = make_step(plan)(init_state(plan), jax.tree.map(deal, batch))
    return model_of(state)["weights"], metrics


@pytest.mark.parametrize(
    "microbatches, devices, weights",
    [
        pytest.param(4, 1, (), id="4-1"),
        pytest.param(2, 4, (), id="2-4"),
        pytest.param(2, 4, (1.0, 5.0, 2.0), id="weights"),
    ],
)
def test_an_update_is_the_same_however_a_batch_is_cut(microbatches, devices, weights):
    """Rows have unequal numbers of documents, of which one is all padding."""
    rows = in_rows(documents())
    batch = packed([*rows, *[[]] * (8 - len(rows))], T)
    chosen = replace(objective(), class_weights=weights)
    (plain, one), (other, two) = (
        after(batch, *cut, chosen) for cut in ((1, 1), (microbatches, devices))
    )
    total = sum(weights[label] if weights else 1 for _, label in documents())
    assert float(one["target_tokens"]) == float(two["target_tokens"]) == total
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_held_out_texts_are_counted_by_class():
    """Over batches of any size; `documents` are given a class by the logits written out above."""
    w, chosen = weights(), objective()
    rows = in_rows(documents())
    batch = packed(rows, T)
    plain = {name: np.asarray(getattr(batch, name)) for name in Batch.__dataclass_fields__}
    plain["text_bytes"] = np.zeros(len(rows))
    pieces = [{n: a[cut] for n, a in plain.items()} for cut in (slice(0, 1), slice(1, None))]
    found = evaluate_rows(MODEL, chosen, Compute(), w, "rows", pieces)
    wanted = np.zeros((K, K))
    classify = chosen.model_over(MODEL).classify
    logits = np.asarray(jax.jit(lambda w: classify(w, batch, Compute())[0])(w))
    for row, inside in enumerate(rows):
        for place, (_, label) in enumerate(inside):
            wanted[label, int(np.argmax(logits[row, place]))] += 1
    np.testing.assert_array_equal(found.confusion, wanted)
    assert found.tokens == len(LENGTHS) == wanted.sum()
    assert found.accuracy == pytest.approx(np.trace(wanted) / wanted.sum())


def test_the_work_has_no_head_over_the_vocabulary():
    long = replace(MODEL, vocab_size=100_000)
    work = objective().works(long, T)[""]
    base = replace(MODEL, vocab_size=10)
    d = MODEL.embed_dim
    wanted = base.work(T).flops_per_token() + 6 * (d * d + d * K - d * 10)
    np.testing.assert_allclose(work.flops_per_token(), wanted)


def test_what_is_refused():
    said = {"kind": "classify", "labels": ["yes"]}
    with pytest.raises(UserError, match="labels"):
        validate(Classify, said, "objective.")
    with pytest.raises(UserError, match="'a' occurs twice"):
        Classify(labels=("a", "b", "a"))
    with pytest.raises(UserError, match="' b' is empty or has spaces"):
        Classify(labels=("a", " b"))
    llama = Llama(
        vocab_size=V, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=6, seq_len=T,
    )  # fmt: skip
    with pytest.raises(
        UserError, match="'llama' has no head over documents here; use 'eurobert' or"
    ):
        objective().spec(llama)
    with pytest.raises(UserError, match="'cls' is not one of eurobert; use 'late' or 'mean' or"):
        objective("cls").spec(MODEL)
