"""The loss of answers on several devices, and of documents packed in any way."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core.contract import Batch
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.answer_spans import Answer
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.objectives.labeled_rows import packed
from tests.train.test_step import SEQ_LEN, assert_close_to_largest, make_run, model_of

MODEL = ModernBert(
    vocab_size=64, embed_dim=32, mlp_dim=40, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8,
    seq_len=SEQ_LEN, window=5,
)  # fmt: skip
LENGTHS = ([9, 7], [SEQ_LEN - 2], [3, 4, 8], [5], [2, 2, 6], [11], [], [1, 6])


def rows_of_questions(order=1):
    """Rows of documents whose answers start and end anywhere."""
    rng = np.random.default_rng(2)
    batch = packed([[(rng.integers(4, 64, n), 0) for n in row] for row in LENGTHS], SEQ_LEN)
    weight = np.zeros(batch.tokens.shape, np.float32)
    for number, row in enumerate(LENGTHS):
        at = 0
        for n in row:
            first, last = sorted(rng.integers(0, n, 2))
            weight[number, at + first] += 1
            weight[number, at + last] += 2
            at += n
    fields = batch.tokens, batch.segment_ids, batch.positions, weight
    return Batch(*(field[::order] for field in fields))


def after(batch, microbatches, devices, **mesh):
    """Gradients of a step, as Adam's first moments hold them, and its metrics."""
    run = make_run(num_microbatches=microbatches)
    objective = Answer(window_tokens=SEQ_LEN, window_overlap=2)
    run = replace(run, model=MODEL, objective=objective, mesh=Mesh(**mesh))
    # as the feed deals rows out
    deal = lambda a: a.reshape(-1, microbatches, SEQ_LEN).swapaxes(0, 1)  # noqa: E731
    plan = resolve(run, jax.devices()[:devices])
    with jax.set_mesh(plan.mesh):
        state, metrics = make_step(plan)(init_state(plan), jax.tree.map(deal, batch))
    return model_of(state)["optimizer"]["mu"], metrics


@pytest.mark.parametrize("microbatches, devices, mesh", [(2, 4, {"context": 2})])
def test_gradients_are_the_same_however_a_batch_is_cut(microbatches, devices, mesh):
    """Rows have unequal numbers of documents, of which one is all padding; on several devices each
    row is cut, too. (Weights after Adam's first step would differ where gradients are as small as
    its epsilon: there the step is in proportion to roundings of float32.)"""
    plain, one = after(rows_of_questions(), 1, 1)
    other, two = after(rows_of_questions(-1), microbatches, devices, **mesh)
    assert float(one["target_tokens"]) == float(two["target_tokens"]) == sum(map(len, LENGTHS))
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-5)
    for gradients in (other, plain):
        assert np.abs(gradients["classifier"].pop("out_bias")).max() < 1e-8  # no softmax sees it
    assert all(np.abs(leaf).max() > 1e-8 for leaf in jax.tree.leaves(plain))
    assert_close_to_largest(other, plain)
