"""Distillation against torch: loss, gradients and metrics of packed rows with padding and weights,
whole and in chunks, with a teacher of another size and family."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.models.llama import Llama
from lmwright.models.modernbert import ModernBert
from lmwright.models.olmo2 import Olmo2
from lmwright.objectives.clm import Clm
from lmwright.objectives.distill import TEACHER, Distill

ROWS, LENGTH, VOCAB = 3, 20, 56
STUDENT = Llama(
    vocab_size=VOCAB, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=LENGTH, head="tied",
)  # fmt: skip
TEACHERS = {
    "same": STUDENT,
    "another": Olmo2(
        vocab_size=VOCAB,
        embed_dim=32,
        mlp_dim=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        seq_len=LENGTH,
        head="untied",
    ),
}
COMPUTE = Compute(precision="fp32", loss_chunk_tokens=LENGTH)


def batch_of():
    """Two segments a row, padding in two rows, and weights that are not all one."""
    dice = np.random.default_rng(0)
    ids = np.array([[1] * 9 + [2] * 11, [1] * 6 + [2] * 8 + [0] * 6, [1] * 17 + [0] * 3])
    places = np.arange(LENGTH) - np.array([[list(row).index(i) for i in row] for row in ids])
    weights = dice.uniform(0.2, 2, ids.shape) * (ids > 0) * (places > 0)
    tokens = dice.integers(0, VOCAB, ids.shape)
    return Batch(*(jnp.asarray(a, jnp.int32) for a in (tokens, ids, places)),
                 jnp.asarray(weights, jnp.float32))  # fmt: skip


BATCH = batch_of()


def weights_of(model, seed):
    """Weights whose logits are far from even."""
    fresh = init_weights(model.spec(), jax.random.key(seed))
    return jax.tree.map(lambda a: 2 * np.asarray(a), fresh)


def logits_of(model, w):
    return model.logits(w, model.hidden(w, BATCH, COMPUTE)[0])


def torch_loss(student, teacher, alpha, temperature):
    """Sums of the loss, of cross-entropy and of KL, and d loss / d student logits."""
    torch = pytest.importorskip("torch", reason="torch is the reference")
    F = torch.nn.functional
    z = torch.tensor(np.asarray(student[:, :-1]), requires_grad=True)
    y = torch.tensor(np.asarray(teacher[:, :-1]))
    weights = torch.tensor(np.asarray(BATCH.loss_weight[:, 1:]))
    targets = torch.tensor(np.asarray(BATCH.tokens[:, 1:]), dtype=torch.long)
    nll = F.cross_entropy(z.transpose(1, 2), targets, reduction="none") * weights
    kl = F.kl_div(
        F.log_softmax(z / temperature, -1), F.log_softmax(y / temperature, -1),
        reduction="none", log_target=True,
    ).sum(-1) * weights  # fmt: skip
    total = (1 - alpha) * nll.sum() + alpha * temperature**2 * kl.sum()
    total.backward()
    gradient = np.zeros(student.shape, np.float32)
    gradient[:, :-1] = z.grad.numpy()
    return total.item(), nll.sum().item(), kl.sum().item(), gradient


@pytest.mark.parametrize(
    "teacher, chunk, alpha, temperature",
    [
        ("another", 7, 0.3, 2.5),
        ("same", 20, 1.0, 1.0),
        pytest.param("another", 20, 0.3, 2.5, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_torch(teacher, chunk, alpha, temperature):
    model = TEACHERS[teacher]
    objective = Distill(teacher="there", teacher_model=model, alpha=alpha, temperature=temperature)
    w, frozen = weights_of(STUDENT, 0), weights_of(model, 1)
    compute = replace(COMPUTE, loss_chunk_tokens=chunk)

    def total(w):
        found = objective.loss(STUDENT, w | {TEACHER: frozen}, BATCH, None, compute)
        return found.total, found

    (_, found), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(w)
    logits, pull_back = jax.vjp(jax.jit(lambda w: logits_of(STUDENT, w)), w)
    there = jax.jit(lambda w: logits_of(model, w))(frozen)
    want, nll, kl, gradient = torch_loss(logits, there, alpha, temperature)
    np.testing.assert_allclose(found.total, want, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["nll"][0], nll, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["teacher_kl"][0], kl, rtol=1e-5)
    np.testing.assert_allclose(found.weight, np.sum(BATCH.loss_weight[:, 1:]), rtol=1e-6)
    (expected,) = pull_back(jnp.asarray(gradient))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    if chunk < LENGTH:  # another program: nothing is differentiated
        np.testing.assert_allclose(jax.jit(lambda w: total(w)[0])(w), want, rtol=1e-5)


def compiled_flops(objective, w):
    """FLOPs of a loss and its gradient for the student, as XLA counts them."""
    beside = {name: tree for name, tree in w.items() if name == TEACHER}
    compute = replace(COMPUTE, unroll=True)  # loops count once
    loss = lambda own, beside: objective.loss(STUDENT, own | beside, BATCH, None, compute).total  # noqa: E731
    own = {name: tree for name, tree in w.items() if name != TEACHER}
    return jax.jit(jax.grad(loss)).lower(own, beside).compile().cost_analysis()["flops"]


def test_flops_count_one_forward_pass_of_the_teacher():
    """Against the compiler's count, relative to a run without a teacher."""
    teacher = replace(STUDENT, embed_dim=96, mlp_dim=160, head_dim=24)
    objective = Distill(teacher="there", teacher_model=teacher, alpha=1.0)
    w = weights_of(STUDENT, 0)
    more = compiled_flops(objective, w | {TEACHER: weights_of(teacher, 1)}) - compiled_flops(
        Clm(), w
    )
    work = objective.works(STUDENT, LENGTH)[TEACHER]
    assert more / (ROWS * LENGTH) == pytest.approx(work.flops_per_token(), rel=0.15)


def test_a_frozen_teacher_is_a_third_of_the_work():
    """A gradient takes two more products for each of the forward pass."""
    work = Distill(teacher="there").works(STUDENT, LENGTH)
    assert 3 * work[TEACHER].flops_per_token() == pytest.approx(work[""].flops_per_token())


def test_the_teacher_takes_no_gradient():
    objective = Distill(teacher="there", teacher_model=STUDENT)
    w = weights_of(STUDENT, 0)
    fn = lambda frozen: objective.loss(STUDENT, w | {TEACHER: frozen}, BATCH, None, COMPUTE).total  # noqa: E731
    for gradient in jax.tree.leaves(jax.grad(fn)(weights_of(STUDENT, 1))):
        assert not np.any(gradient)


def test_held_out_loss_is_that_of_the_text():
    """With and without a teacher at hand."""
    w = weights_of(STUDENT, 0)
    held_out = Distill(teacher="there", teacher_model=STUDENT).for_eval()
    want = Clm().loss(STUDENT, w, BATCH, None, COMPUTE)
    for beside in ({}, {TEACHER: weights_of(STUDENT, 1)}):
        found = held_out.loss(STUDENT, w | beside, BATCH, None, COMPUTE)
        np.testing.assert_array_equal(found.total, want.total)


@pytest.mark.parametrize(
    "teacher, told",
    [
        (replace(STUDENT, vocab_size=64), "predicts 64 tokens and the student 56"),
        (
            ModernBert(
                vocab_size=VOCAB,
                embed_dim=24,
                mlp_dim=40,
                num_layers=2,
                num_heads=4,
                num_kv_heads=4,
                head_dim=6,
                seq_len=20,
            ),
            "is an encoder",
        ),
    ],
)
def test_a_teacher_of_other_tokens_is_refused(teacher, told):
    with pytest.raises(UserError, match=told):
        Distill(teacher="there", teacher_model=teacher).works(STUDENT, LENGTH)
