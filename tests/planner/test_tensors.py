"""What the backward pass is said to read, against what JAX keeps and computes again."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from lmwright.core.contract import Batch
from lmwright.core.param import map_params
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import saved_bytes
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.tensors import OFFLOADED, RECOMPUTED, SAVED, tensor_lines
from lmwright.planner.cost import cost_of
from tests.planner.runs import SMALL, run_of

ROWS, TOKENS = 4, 256
CPU = parse_machine("cpu:1")
# the shape of SMALL has no norms of q and k, Gemma 3 has them, and behind both branches
PRESETS = {
    "kisoku-3b": SMALL,
    "gemma3-1b": (*SMALL, "model.num_layers=14"),
    "olmo2-1b": (*SMALL, "model.num_kv_heads=6"),
}
POLICIES = [
    *((remat, "none") for remat in ("dots", "gate", "mlp", "block")),
    *(("block", offload) for offload in ("block_inputs", "attention", "products")),
    ("mlp", "block_inputs"),
    ("mlp", "none", "train.mlp_chunk_tokens=128"),
    ("block", "none", "train.mlp_chunk_tokens=128"),
]
OFTEN = (("block", "none"), ("mlp", "block_inputs"))


def forward(run, plan):
    """The sum of the last residual stream as a function of abstract weights, and these."""
    compute = replace(plan.compute, unroll=False)
    weights = map_params(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), run.model.spec())
    ids = jnp.ones((ROWS, TOKENS), jnp.int32)
    batch = Batch(ids, ids, ids, jnp.ones((ROWS, TOKENS), jnp.float32))
    return lambda w: jnp.sum(run.model.hidden(w, batch, compute)[0]), weights


def kept_by_jax(run, plan):
    """Arrays [layers, rows, tokens, ...] that JAX keeps of the forward pass."""
    loss, weights = forward(run, plan)
    pullback = jax.eval_shape(lambda w: jax.vjp(loss, w)[1], weights)
    given = {(a.shape, a.dtype) for a in jax.tree.leaves(weights)}
    leaves = [a for a in jax.tree.leaves(pullback) if (a.shape, a.dtype) not in given]
    floats = [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]
    return [a for a in floats if a.size % (ROWS * TOKENS) == 0 and a.ndim >= 4]


def products_of_jax(run, plan):
    """Number of matmuls in the program of the gradient, by the einsum that they are of; a loop
    counts once."""
    loss, weights = forward(run, plan)
    counts = Counter()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                counts[str(eqn.source_info.name_stack).rpartition("/")[2]] += 1
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple | list) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(jax.grad(loss))(weights).jaxpr)
    return counts


def quick_of(folder, preset, *words):
    return Quick.of(run_of(folder, *PRESETS[preset], *words, preset=preset, batch=ROWS), CPU)


@pytest.fixture(scope="module")
def products_once(tmp_path_factory):
    """`products_of_jax` of a preset where nothing is computed again."""

    @cache
    def count(preset):
        quick = quick_of(tmp_path_factory.mktemp("once"), preset, "train.remat=none")
        return products_of_jax(quick.run, quick.plan)

    return count


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_is_what_jax_keeps(tmp_path, preset, policy):
    words = f"train.remat={policy[0]}", f"train.offload={policy[1]}", *policy[2:]
    quick = quick_of(tmp_path, preset, *words)
    kept = [t for t in quick.tensors if t.fate != RECOMPUTED]
    sizes = sum(t.host_bytes if t.fate == OFFLOADED else t.chip_bytes for t in kept)
    assert sizes == pytest.approx(
        sum(a.size * a.dtype.itemsize for a in kept_by_jax(quick.run, quick.plan))
    )
    saved = sum(t.chip_bytes for t in kept if t.fate == SAVED)
    assert saved == pytest.approx(sum(map(saved_bytes, quick.layouts)))
    assert sum(t.host_bytes for t in kept) == pytest.approx(quick.memory.host)


EINSUMS = {"btd,df->btf": ("gate", "up"), "btf,fd->btd": ("down",), "btd,dh->bth": ("q", "k", "v"),
           "btnh,nhd->btd": ("o",)}  # fmt: skip
BRANCHES = 2  # of a matmul, of which the platform's is taken


CASES = [(preset, policy) for policy in POLICIES for preset in PRESETS]
EACH = POLICIES[::2]  # tried whenever tests run, with one preset
SELDOM = [
    (preset, policy)
    for preset, policy in CASES
    if policy not in OFTEN and not (preset == "gemma3-1b" and policy in EACH)
]


@pytest.mark.parametrize(
    "preset, policy",
    [pytest.param(*c, marks=pytest.mark.slow) if c in SELDOM else c for c in CASES],
)
def test_what_is_computed_again_is_what_jax_computes_again(tmp_path, products_once, preset, policy):
    words = f"train.remat={policy[0]}", f"train.offload={policy[1]}", *policy[2:]
    quick = quick_of(tmp_path, preset, *words)
    counts = products_of_jax(quick.run, quick.plan)
    counts.subtract(products_once(preset))
    again = {t.name for t in quick.tensors if t.fate == RECOMPUTED}
    places = Counter(w.path.rpartition(".")[2] for w in quick.layouts[0].stock.model_weights)
    for einsum, names in EINSUMS.items():
        if len(policy) > 2 and preset == "kisoku-3b" and names == ("down",):
            continue  # a chunk's result, which nothing reads; compilers drop it
        expected = sum(places[name] for name in names if name in again)
        assert counts[einsum] == BRANCHES * expected, einsum
    assert (counts["vmap()"] > 0) == ("attention" in again)


def test_a_tensor_on_a_mesh(tmp_path):
    """Gemma 2 9B on 8 chips, rows of 8,192 tokens: the arithmetic by hand."""
    long = "model.seq_len=8192", "data.pack.seq_len=8192", "train.remat=block", "mesh.tensor=2"
    exact = "train.offload=block_inputs", "train.mlp_chunk_tokens=4096", "optim.offload=moments"
    run = run_of(tmp_path, *long, *exact, preset="gemma2-9b", batch=16)
    quick = Quick.of(run, parse_machine("v5e-8"))
    by_name = {t.name: t for t in quick.tensors}
    stream = 4 * 4096 * 3584 * 2  # 16 rows over fsdp 4, half of each row's tokens
    block = by_name["block input"]
    assert (block.shape, block.fate, block.times) == ((4, 4096, 3584), OFFLOADED, 42)
    assert (block.chip_bytes, block.host_bytes) == (stream, 42 * stream)
    assert {"norms", "q", "gate", "down"} <= set(block.needed_by)
    up = by_name["up"]  # in two chunks, half of the width
    assert (up.shape, up.fate, up.times) == ((4, 4096, 7168), RECOMPUTED, 84)
    assert up.chip_bytes == 4 * 4096 * 7168 * 2 and up.needed_by[0] == "down"
    assert by_name["down"].needed_by == ("norms",)  # behind the branch
    assert by_name["moments"].host_bytes == quick.memory.host - block.host_bytes > 0
    text = tensor_lines(quick.tensors)
    assert len(text) == 9 and "moments, on the host, for the optimizer" in "\n".join(text)
    assert " (--json)" in text[-2]


def test_the_bus_is_said(tmp_path):
    """42 block inputs of 8 rows out and in again, over the 16 GB/s of a v5e."""
    long = "model.seq_len=8192", "data.pack.seq_len=8192", "train.remat=block"
    run = run_of(tmp_path, *long, "train.offload=block_inputs", preset="gemma2-9b", batch=8)
    quick = Quick.of(run, parse_machine("v6e-8"))
    assert quick.timing.host_bytes == 2 * 42 * 8192 * 3584 * 2
    (line,) = [line for line in quick.lines(cost(quick)) if "GB/s each way" in line]
    assert "of 32 GB/s each way" in line and "exposed" in line


def cost(quick):
    return cost_of(quick.run, quick.machine, quick.step_s, quick.plan.tokens_per_step)
