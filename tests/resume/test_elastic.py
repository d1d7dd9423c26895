"""A run goes on with more or fewer devices, on another mesh, in other microbatches: the batches,
the schedule and, but for rounding, the losses are those of the undisturbed run."""

import signal
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.models.experts import Experts
from lmwright.models.moe import Mixtral
from lmwright.objectives.kto import Kto
from lmwright.objectives.sft import Sft
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.step import summed_gradients
from lmwright.train.hooks import Hook
from lmwright.train.identity import identity, rows_are_alone
from lmwright.train.session import train
from tests.resume.small_runs import STEPS, in_dir, losses

MIXTRAL = Mixtral(
    vocab_size=320, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, seq_len=32,
    experts=Experts(num_experts=4, experts_per_token=2, mlp_dim=16),
)  # fmt: skip
ADAPTERS = LowRank(rank=2, adapters=(Adapter(name="a"), Adapter(name="b")))
STOP = 7  # between two checkpoints


class Preempted(Hook):
    def after_step(self, session, step):
        if step == STOP:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def small_run(run_of_two_layers):
    """With a layer for each stage."""
    return run_of_two_layers


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory):
    """The run, and its losses on four devices without a break."""
    run = replace(small_run, train=replace(small_run.train, global_batch_size=8))
    run = in_dir(run, tmp_path_factory.mktemp("whole") / "run")
    assert train(run, jax.devices()[:4]).exit_code == 0
    return run, losses(run)


@pytest.mark.parametrize(
    ("devices", "mesh", "pieces"),
    [
        (2, Mesh(), 1),
        pytest.param(8, Mesh(), 1, marks=pytest.mark.slow),
        pytest.param(1, Mesh(), 8, marks=pytest.mark.slow),
        pytest.param(8, Mesh(data=2, tensor=2), 2, marks=pytest.mark.slow),
        pytest.param(4, Mesh(stage=2), 4, marks=pytest.mark.slow),
        pytest.param(2, Mesh(context=2), 4, marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_with_other_devices(whole, tmp_path, devices, mesh, pieces):
    run, expected = whole
    run = in_dir(run, tmp_path / "run")
    assert train(run, jax.devices()[:4], hooks=[Preempted()]).exit_code == 42
    other = replace(run, mesh=mesh, train=replace(run.train, num_microbatches=pieces))
    assert train(other, jax.devices()[:devices]).exit_code == 0
    got = losses(run)
    assert sorted(got) == list(range(1, STEPS + 1))
    assert [got[k] for k in range(1, STOP + 1)] == [expected[k] for k in range(1, STOP + 1)]
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=2e-5)


@pytest.mark.parametrize(
    ("mesh", "pieces"),
    [(Mesh(), 1), pytest.param(Mesh(), 4, marks=pytest.mark.slow), (Mesh(stage=2), 2)],
)
def test_noise_is_drawn_by_row(small_run, mesh, pieces):
    """The gradients of a step do not depend on how its rows are cut into microbatches."""
    run = replace(small_run, objective=Sft(neftune_alpha=5.0))

    def gradients(mesh, pieces, devices):
        train = replace(run.train, global_batch_size=8, num_microbatches=pieces)
        plan = resolve(replace(run, mesh=mesh, train=train), jax.devices()[:devices])
        rng = np.random.default_rng(3)
        tokens = rng.integers(0, 300, (8, plan.seq_len)).astype(np.int32)
        ones = np.ones_like(tokens)
        rows = {"tokens": tokens, "segment_ids": ones, "positions": np.cumsum(ones, 1) - 1,
                "loss_weight": ones.astype(np.float32)}  # fmt: skip
        cut = {k: v.reshape(-1, pieces, v.shape[1]).swapaxes(0, 1) for k, v in rows.items()}
        trainees = plan.training.trainees
        with jax.set_mesh(plan.mesh):
            weights = {t.name: init_weights(t.spec, jax.random.key(1)) for t in trainees}
            compute = jax.jit(
                lambda w, b: summed_gradients(plan, trainees, {}, w, b, [jax.random.key(2)])
            )
            grads, (loss,) = compute(weights, Batch(**cut))
        return float(loss.total), jax.tree.map(np.asarray, grads)

    loss, grads = gradients(Mesh(), 2, 1)
    other, others = gradients(mesh, pieces, 2)
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), others, grads)


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        ({}, True),
        ({"objective": Sft(neftune_alpha=5.0)}, True),
        ({"objective": Sft(neftune_alpha=5.0), "lora": LowRank(rank=2)}, True),
        ({"objective": Sft(neftune_alpha=5.0), "lora": ADAPTERS}, False),
        ({"lora": LowRank(rank=2, dropout=0.1)}, False),
        ({"lora": LowRank(rank=2, adapters=(Adapter(name="a", dropout=0.1),))}, False),
        ({"lora": LowRank(rank=2)}, True),
        ({"model": MIXTRAL}, False),
        ({"objective": Kto(), "lora": LowRank(rank=2)}, False),  # one reference point
        ({"objective": Kto(loss_kind="apo-zero-unpaired"), "lora": LowRank(rank=2)}, True),
    ],
)
def test_microbatches_may_change_where_they_only_order_a_sum(small_run, change, alone):
    assert rows_are_alone(replace(small_run, **change)) == alone
    one, two = (
        identity(replace(small_run, **change, train=replace(small_run.train, num_microbatches=n)))
        for n in (1, 2)
    )
    assert (one == two) == alone


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_chunks_of_an_mlp_may_change_where_nothing_is_dropped(small_run, dropout):
    run = replace(small_run, lora=LowRank(rank=2, dropout=dropout))
    one, two = (
        identity(replace(run, train=replace(run.train, remat="block", mlp_chunk_tokens=n)))
        for n in (None, 16)
    )
    assert (one == two) == (not dropout)
