"""DeBERTa: the same numbers whatever the layers' loop and what it keeps, its work as JAX traces it,
and what it cannot be cut over."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.models.counts import count_by_part
from lmwright.models.deberta import Deberta
from lmwright.objectives.mlm import Mlm
from lmwright.optim import KINDS
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.plan import resolve
from lmwright.program.targets import targets_of
from tests.in_memory import abstract_weights
from tests.planner.test_analytic import dot_flops

T, ROWS = 48, 3
MODEL = Deberta(
    vocab_size=96, embed_dim=64, mlp_dim=80, num_layers=3, num_heads=4, num_kv_heads=4,
    head_dim=12, seq_len=T, position_buckets=8, max_distance=32,
)  # fmt: skip
OBJECTIVE = Mlm(mask_token_id=3, mask_ratio=0.25)
RUN = Run(
    name="t", dir="unused", model=MODEL, objective=OBJECTIVE, data=Data(dir="unused"),
    optim=KINDS["adamw"](learning_rate=1e-3),
    train=Train(steps=1, global_batch_size=8, precision="fp32"),
)  # fmt: skip


def loss_of(compute):
    return lambda w, batch: (
        OBJECTIVE.loss(MODEL, w, batch, jax.random.split(jax.random.key(1), ROWS), compute).total
    )


@pytest.fixture(scope="module")
def problem():
    """Weights, and packed rows with padding."""
    draws = np.random.default_rng(0)
    ids = np.repeat([[1, 1, 2, 3], [1, 2, 2, 0], [1, 1, 1, 1]], T // 4, axis=1)
    tokens, real = draws.integers(4, 96, ids.shape), (ids > 0).astype(np.float32)
    batch = Batch(*map(jnp.asarray, (tokens, ids, np.zeros_like(ids), real)))
    stir = lambda a: a + 0.1 * draws.standard_normal(a.shape).astype(a.dtype)  # noqa: E731
    return jax.tree.map(stir, init_weights(MODEL.spec(), jax.random.key(0))), batch


@pytest.fixture(scope="module")
def expected(problem):
    return jax.jit(jax.value_and_grad(loss_of(Compute())))(*problem)


@pytest.mark.parametrize(
    ("near", "compute"),
    [
        (2e-5, Compute(kernels="cpu", unroll=True, remat="dots")),
        (2e-5, Compute(remat="block", mlp_chunk_tokens=12)),
        (0.1, Compute(remat="block", block_inputs="int12")),
    ],
)
def test_ways_to_compute(near, compute, problem, expected):
    found = jax.jit(jax.value_and_grad(loss_of(compute)))(*problem)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=near * np.abs(b).max())


def test_work_is_what_jax_traces(problem):
    """But for the products with distances, which the reference has for each pair of distance and
    token, the far ones again and again, and the rows of distances, which are projected once."""
    leaf = lambda dtype: jax.ShapeDtypeStruct((ROWS, T), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))
    compute = Compute(loss_chunk_tokens=T, kernels="tpu")
    traced = jax.make_jaxpr(jax.grad(loss_of(compute)))(abstract_weights(MODEL.spec()), batch)
    work = OBJECTIVE.works(MODEL, T)[""]
    width, rows = MODEL.num_heads * MODEL.head_dim, 2 * MODEL.position_buckets
    met = work.mixing_flops / (2 * 2 * width * MODEL.num_layers)
    assert met == rows  # all of them: these rows are longer than `max_distance`
    assert MODEL.work(5).mixing_flops / work.mixing_flops == 9 / met  # distances -4 to 4
    once = 3 * 2 * 2 * rows * MODEL.embed_dim * width * MODEL.num_layers
    again = 3 * 2 * 2 * (2 * T - 1 - met) * width * MODEL.num_layers * ROWS * T
    found = dot_flops(traced.jaxpr) - once - again
    assert found == pytest.approx(work.flops_per_token() * ROWS * T, rel=1e-6)


def test_parts_and_targets():
    counts = {(one.part, one.inside): one.total for one in count_by_part(MODEL)}
    assert counts["attention", False] == 2 * 8 * 64 and counts["embedding", False] == 96 * 64
    paths = {target.path for target in targets_of(MODEL, MODEL.spec())}
    assert "layers.q" in paths and not {"relative", "embed"} & paths


@pytest.mark.parametrize("axis, what", [("context", "rows"), ("stage", "layers")])
def test_what_it_cannot_be_cut_over(axis, what):
    run = replace(RUN, mesh=Mesh(**{axis: 2, "fsdp": 4}), model=replace(MODEL, num_layers=4))
    with pytest.raises(UserError, match=rf"mesh\.{axis}: a deberta model cannot cut its {what}"):
        resolve(run, jax.devices()[:8])


def test_it_is_planned():
    quick = Quick.of(RUN, parse_machine("v5e-8"))
    assert quick.timing.by_kind["mixing"] > 0 and quick.memory.peak > 0
