"""The train step: microbatches, chunks and rematerialization change memory, not numbers;
any mesh gives the single device's result."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.models.eurobert import EuroBert
from lmwright.models.llama import Llama
from lmwright.nn.xent import chunked_xent
from lmwright.objectives.clm import Clm
from lmwright.objectives.mlm import Mlm
from lmwright.optim import KINDS
from lmwright.optim.kinds import Linear
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step, summed_gradients

SEQ_LEN, VOCAB = 24, 61


def make_run(model=None, **train):
    model = {
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head": "untied", **(model or {}),
    }  # fmt: skip
    fields = {"steps": 10, "global_batch_size": 8, "precision": "fp32", "loss_chunk_tokens": 7}
    return Run(
        name="t",
        dir="unused",
        model=Llama(
            vocab_size=VOCAB + 3, embed_dim=32, mlp_dim=40, head_dim=8,
            seq_len=SEQ_LEN, **model,
        ),
        objective=Clm(z_loss=1e-3),
        optim=KINDS["adamw"](learning_rate=1e-2),
        data=Data(dir="unused"),
        train=Train(**(fields | train)),
    )  # fmt: skip


def make_batch(run, seed=0):
    """[A, B, T] with padding and segments of uneven lengths, so that weights differ by row."""
    rng = np.random.default_rng(seed)
    rows = run.train.global_batch_size
    shape = (run.train.num_microbatches, rows // run.train.num_microbatches, SEQ_LEN)
    ends = rng.integers(1, SEQ_LEN, rows)
    at = np.arange(SEQ_LEN)
    segments = np.where(at < ends[:, None], 1, 2)
    segments[::3, -5:] = 0
    starts = np.where(segments == 1, 0, ends[:, None])
    weights = (segments > 0) & (at != starts)
    cut = lambda a, t: a.reshape(shape).astype(t)  # noqa: E731
    return Batch(
        tokens=cut(rng.integers(0, VOCAB, (rows, SEQ_LEN)), jnp.int32),
        segment_ids=cut(segments, jnp.int32),
        positions=cut(at - starts, jnp.int32),
        loss_weight=cut(weights, jnp.float32),
    )


def once(fn):
    """Remembers the result of each run: several tests compare with the same one."""
    known = {}

    @functools.wraps(fn)
    def found(run, *args, **kwargs):
        key = repr((run, args, kwargs))
        if key not in known:
            known[key] = fn(run, *args, **kwargs)
        return known[key]

    return found


@once
def one_step(run, devices=1):
    plan = resolve(run, jax.devices()[:devices])
    with jax.set_mesh(plan.mesh):
        step = make_step(plan)
        return step(init_state(plan), make_batch(run))


@once
def gradients(run):
    plan = resolve(run, jax.devices()[:1])
    batch = make_batch(run)
    trainees, keys = plan.training.trainees, [jax.random.key(0)]
    fn = jax.jit(lambda w: summed_gradients(plan, trainees, {}, {"model": w}, batch, keys))
    grads, (loss,) = fn(model_of(init_state(plan))["weights"])
    return grads["model"], loss


def model_of(state):
    return state["trained"]["model"]


def assert_close(a, b, rtol=2e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_close_to_largest(a, b, share=1e-5):
    """Sums over hundreds of tokens cancel: each leaf is compared on its own scale."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=share * np.abs(y).max()), a, b
    )


@pytest.mark.parametrize(
    "change",
    [
        {"num_microbatches": 4},
        {"remat": "block"},
        {"remat": "dots"},
        {"remat": "mlp"},
        {"loss_chunk_tokens": 1000},
    ],
)
def test_gradients_do_not_depend_on(change):
    base, other = make_run(), make_run(**change)
    grads, loss = gradients(base)
    other_grads, other_loss = gradients(other)
    assert float(loss.weight) == float(other_loss.weight)
    assert_close(loss.total, other_loss.total)
    assert_close_to_largest(grads, other_grads)


@pytest.mark.parametrize(
    "axes, head, remat",
    [
        ({"fsdp": 8}, "untied", "none"),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, "tied", "none", marks=pytest.mark.slow),
        ({"tensor": 2}, "untied", "none"),
        pytest.param({"fsdp": 8}, "tied", "block", marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "fsdp": 2, "tensor": 2}, "untied", "block", marks=pytest.mark.slow
        ),
        pytest.param({"tensor": 2}, "tied", "block", marks=pytest.mark.slow),
    ],
)
def test_meshes_equal_one_device(axes, head, remat):
    run = make_run({"head": head}, global_batch_size=16, num_microbatches=2, remat=remat)
    run = replace(run, optim=replace(run.optim, eps=1e-4))  # Adam amplifies rounding near zero
    alone, metrics = one_step(run)
    count = int(np.prod(list(axes.values())))
    sizes = {"fsdp": 1} | axes
    many, many_metrics = one_step(replace(run, mesh=Mesh(**sizes)), devices=count)
    assert_close(metrics, many_metrics, rtol=1e-5)
    assert_close(model_of(alone)["weights"], model_of(many)["weights"], rtol=1e-4, atol=1e-5)
    assert len(model_of(many)["weights"]["layers"]["up"].sharding.device_set) == count
    moments = [
        leaf for leaf in jax.tree.leaves(model_of(many)["optimizer"])
        if leaf.shape == model_of(many)["weights"]["layers"]["up"].shape
    ]  # fmt: skip
    assert moments
    for leaf in moments:
        assert leaf.sharding.spec != jax.sharding.PartitionSpec(), "optimizer state is sharded"


def test_bf16_is_near_fp32():
    _, exact = one_step(make_run())
    _, rough = one_step(make_run(precision="bf16"))
    np.testing.assert_allclose(rough["loss"], exact["loss"], rtol=5e-3)
    np.testing.assert_allclose(rough["grad_norm"], exact["grad_norm"], rtol=3e-2)


def test_logits_are_never_whole():
    run = make_run(loss_chunk_tokens=6)
    plan = resolve(run, jax.devices()[:1])
    text = make_step(plan).lower(init_state(plan), make_batch(run)).as_text()
    vocab = run.model.vocab_size
    sizes = [
        np.prod([int(d) for d in dims[:-1].split("x")], dtype=np.int64)
        for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
        if str(vocab) in dims.split("x")
    ]
    assert max(sizes) >= 8 * 6 * vocab, "chunks of the logits are there"
    assert max(sizes) < 8 * SEQ_LEN * vocab


def test_chunked_loss_equals_whole_logits():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((3, 23, 11)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((11, 19)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 19, (3, 23)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (3, 23)), jnp.float32)
    logits_fn = lambda w, x: jnp.einsum("btd,dv->btv", x, w)  # noqa: E731

    def whole(w, x):
        logits = logits_fn(w, x)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return jnp.sum((nll + 0.3 * z) * weights) * 0.5

    def chunked(w, x):
        return chunked_xent(logits_fn, w, x, targets, weights, chunk=4, z_loss=0.3).total * 0.5

    for a, b in zip(
        *(jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(w, x) for f in (whole, chunked)),
        strict=True,
    ):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_two_runs_are_bit_equal():
    run = make_run(precision="bf16")
    first, second = one_step(run), one_step.__wrapped__(run)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_each_step_hides_other_tokens_and_tells_its_own_rate():
    """The rates are those of torch and transformers: 0 at the first update of a warm-up. Where no
    update changes a weight, losses of one batch differ by what is hidden alone."""
    model = EuroBert(
        vocab_size=VOCAB + 3, embed_dim=32, mlp_dim=40, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, seq_len=SEQ_LEN,
    )  # fmt: skip
    optim = KINDS["adamw"](learning_rate=4e-30, weight_decay=0.0, schedule=Linear(warmup_steps=4))
    run = replace(make_run(), model=model, objective=Mlm(mask_token_id=VOCAB), optim=optim)
    plan = resolve(run, jax.devices()[:1])
    with jax.set_mesh(plan.mesh):
        step, batch, state = make_step(plan), make_batch(run), init_state(plan)
        values = []
        for _ in range(6):
            state, measured = step(state, batch)
            values.append({name: float(value) for name, value in measured.items()})
    rates = [0, 1e-30, 2e-30, 3e-30, 4e-30, 4e-30 * 5 / 6]
    np.testing.assert_allclose([v["learning_rate"] for v in values], rates, rtol=1e-5)
    assert len({v["loss"] for v in values}) == 6


def assert_average_is_that_of_torch(run, steps=5):
    """Over real steps, the moving average of the weights against torch's `swa_utils`."""
    decay, plan = run.train.ema_decay, resolve(run, jax.devices()[:1])
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    leaves = lambda tree: [torch.tensor(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    with jax.set_mesh(plan.mesh):
        step, state = make_step(plan), init_state(plan)
        (name,) = state["trained"]
        expected = leaves(state["trained"][name]["weights"])
        for seed in range(steps):
            batch = make_batch(run, seed)
            if seed == 2:  # a step that is skipped
                batch = replace(batch, loss_weight=jnp.full_like(batch.loss_weight, jnp.nan))
            state, metrics = step(state, batch)
            if seed != 2:
                average(expected, leaves(state["trained"][name]["weights"]), 0)
    assert metrics["skipped"] == 1
    assert len(expected) > 1
    for ours, theirs in zip(leaves(state["trained"][name]["ema"]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("change", [{}, {"num_microbatches": 4}])
def test_the_average_of_the_weights_is_that_of_torch(change):
    assert_average_is_that_of_torch(make_run(ema_decay=0.75, **change))


def test_the_average_of_an_adapter_is_that_of_torch():
    lora = LowRank(base="int8", targets=("attention",), rank=4)
    assert_average_is_that_of_torch(replace(make_run(ema_decay=0.9), lora=lora))


@pytest.mark.parametrize("decay", [0.9, 0.9999, 0.99999])
def test_the_average_of_weights_that_stand_still_is_those_weights(decay):
    """With float32's 0.99999 and 0.00001 as shares it shrinks, to 99.86 % in the end."""
    optim = KINDS["adamw"](learning_rate=1e-30, weight_decay=0.0)
    run = replace(make_run(ema_decay=decay), optim=optim)
    plan = resolve(run, jax.devices()[:1])
    with jax.set_mesh(plan.mesh):
        step, batch, state = make_step(plan), make_batch(run), init_state(plan)
        for _ in range(20):
            state, _ = step(state, batch)
    large = lambda a: np.where(np.abs(a) > 1e-6, a, 0)  # noqa: E731  the others do move
    part = jax.tree.map(lambda leaf: large(np.asarray(leaf)), model_of(state))
    jax.tree.map(np.testing.assert_array_equal, part["ema"], part["weights"])


@pytest.mark.parametrize(
    ("mesh", "train", "message"),
    [
        ({"tensor": 3}, {}, "mesh: asks for 3 devices, and there are 8"),
        ({"fsdp": 2, "tensor": 2}, {}, "mesh: asks for 4 devices"),
        ({"data": "rest"}, {}, "are both 'rest'"),
        ({"stage": 4}, {}, "mesh.stage: 4 does not divide the 2 of axis 'layers'"),
        ({"fsdp": 1, "tensor": 8}, {}, "does not divide"),
        ({}, {"global_batch_size": 12}, "train.global_batch_size: 12 rows"),
        ({}, {"num_microbatches": 3}, "train.global_batch_size: 8 rows"),
    ],
)
def test_impossible_layouts_are_refused(mesh, train, message):
    run = replace(make_run(**train), mesh=Mesh(**mesh))
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(run)
