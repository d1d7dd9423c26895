"""The attention of GPUs equals the reference, in value and gradient, and never holds all scores.
Kernels run interpreted here, and are lowered for CUDA."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import Primitive

from lmwright.core.compute import REMATS, Compute
from lmwright.kernels import (
    gpu_attention,
    gpu_chunks,
    gpu_cudnn,
    gpu_tokamax,
    gpu_walks,
    select,
)
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from lmwright.program.plan import compute_of
from tests.kernels.attention_problem import WAYS_TO_SEE, problem, seen_by
from tests.kernels.test_cpu import near
from tests.kernels.test_tpu_intervals import mesh_of
from tests.planner.runs import run_of


def both(fn, q, k, v, g, *rest):
    """Result and gradients."""

    def run(q, k, v):
        out, back = jax.vjp(lambda *a: fn(*a, *rest), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v)


CHUNKS = partial(gpu_attention.causal_attention, early=True)
BLOCKS = partial(gpu_attention.causal_attention, interpret=True)


@pytest.mark.parametrize("masks", [{}, {"window": 40, "soft_cap": 1.5}, {"window": 200}])
def test_causal_in_chunks(masks, monkeypatch):
    monkeypatch.setattr(gpu_chunks, "MIN_CHUNK", 64)  # several, the last one shorter
    q, k, v, ids, g = problem(2, 301, 6, 2, 10)
    scoring = Scoring(0.37, **masks)
    got = both(CHUNKS, q, k, v, g, ids, scoring)
    near(got, both(attention.causal_attention, q, k, v, g, ids, scoring), share=5e-6)


@pytest.mark.parametrize("kind", WAYS_TO_SEE)
def test_intervals_in_chunks(kind, monkeypatch):
    """Also where queries see no key: zeros, and no gradient."""
    monkeypatch.setattr(gpu_chunks, "MIN_CHUNK", 32)
    q, k, v, ids, g = problem(2, 130, 4, 2, 6)
    seen, reach = seen_by(kind, ids)
    scoring = Scoring(0.37)
    got = both(gpu_attention.attention, q, k, v, g, seen, scoring, reach)
    near(got, both(intervals.attention, q, k, v, g, seen, scoring), share=5e-6)


@pytest.mark.parametrize(
    ("length", "head_dim", "masks"),
    [
        (256, 16, {}),
        (256, 20, {"window": 70, "soft_cap": 1.5}),  # filled up to a power of two
        (192, 80, {"soft_cap": 1.5}),
        (192, 192, {"window": 70}),
    ],
)
def test_causal_by_kernels(length, head_dim, masks):
    """Heads of each size of blocks."""
    q, k, v, ids, g = problem(2, length, 2, 1, head_dim)
    scoring = Scoring(0.37, **masks)
    got = both(BLOCKS, q, k, v, g, ids, scoring)
    near(got, both(attention.causal_attention, q, k, v, g, ids, scoring), share=5e-6)


@pytest.mark.parametrize("kind", WAYS_TO_SEE)
def test_intervals_by_kernels(kind):
    """Blocks of keys that all queries see, some, or none; groups of heads; queries without keys."""
    q, k, v, ids, g = problem(2, 192, 4, 2, 16)
    seen, reach = seen_by(kind, ids)
    scoring = Scoring(0.37)
    attend = partial(gpu_attention.attention, interpret=True)
    got = both(attend, q, k, v, g, seen, scoring, reach)
    near(got, both(intervals.attention, q, k, v, g, seen, scoring), share=5e-6)


def test_a_walk_leaves_out_other_documents():
    """Four documents of 4 blocks of queries and 8 of keys; whole blocks have no mask."""
    ids = jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), 256)[None]
    blocks = 64, 32  # of queries, of keys
    seen = intervals.causal(ids)
    first, full, full_end, end = (a[0] for a in gpu_walks.walk_of_queries(seen, *blocks))
    assert int(jnp.sum(end - first)) == 4 * (2 + 4 + 6 + 8)
    assert int(jnp.sum(full_end - full)) == 4 * (0 + 2 + 4 + 6)
    first, full, full_end, end = (a[0] for a in gpu_walks.walk_of_keys(seen, *blocks))
    assert int(jnp.sum(end - first)) == 4 * 2 * (4 + 3 + 2 + 1)
    assert int(jnp.sum(full_end - full)) == 4 * 2 * (3 + 2 + 1)


def test_blocks_seen_in_part_between_whole_ones_are_masked():
    """Two of five blocks of queries do not see all of the first block of keys."""
    q, k, v, _, g = problem(1, 320, 2, 1, 16)
    at = jnp.arange(320)
    start = jnp.where((at >= 64) & (at < 192), 5, 0)[None].astype(jnp.int32)
    seen = intervals.Interval(start, jnp.full((1, 320), 320, jnp.int32))
    scoring, reach = Scoring(0.37), intervals.Reach()
    attend = partial(gpu_attention.attention, interpret=True)
    got = both(attend, q, k, v, g, seen, scoring, reach)
    near(got, both(intervals.attention, q, k, v, g, seen, scoring), share=5e-6)


@pytest.mark.parametrize("attend", [CHUNKS, BLOCKS], ids=["chunks", "kernels"])
def test_on_a_mesh(attend):
    if attend is CHUNKS and jax.__version_info__[:2] == (0, 11):
        pytest.skip("the CPU compiler of JAX 0.11 crashes on it")
    q, k, v, ids, g = problem(4, 64, 4, 2, 8)
    scoring = Scoring(0.37)
    alone = both(attend, q, k, v, g, ids, scoring)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        near(both(attend, q, k, v, g, ids, scoring), alone)


def compiled_bytes(tokens):
    """Temporary memory of result and gradients, without the kernels."""
    row = lambda heads: jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.bfloat16)  # noqa: E731
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    attend = select.causal_attention(Compute(kernels="early gpu"))

    def run(q, k, v, g, ids):
        out, back = jax.vjp(lambda *a: attend(*a, ids, Scoring(0.3)), q, k, v)
        return out, *back(g)

    compiled = jax.jit(run).lower(row(4), row(2), row(2), row(4), ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_chunks_grows_with_the_tokens():
    few, many = compiled_bytes(2048), compiled_bytes(8192)
    assert many < 5 * few  # 16 times as many scores
    assert many < 4 * 4 * 8192**2  # less than those of one head and layer, kept in float32


def program_for_cuda(device_kind, tokens, head_dim, dtype=jnp.bfloat16, **masks):
    """The gradients' program as a GPU of this kind gets it."""
    compute = Compute(kernels=select.kernels_for("gpu", 1, device_kind))
    attend = select.causal_attention(compute)
    row = lambda heads: jax.ShapeDtypeStruct((1, tokens, heads, head_dim), dtype)  # noqa: E731
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    loss = lambda q, k, v, ids: jnp.sum(attend(q, k, v, ids, Scoring(0.3, **masks)))  # noqa: E731
    triton = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    card = jax.sharding.AbstractDevice(device_kind, None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=card)
    exported = jax.export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["cuda"], disabled_checks=[triton]
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return exported(row(4), row(2), row(2), ids).mlir_module()


def test_gpus_before_ampere_get_chunks():
    """No array holds all scores of a row."""
    text = program_for_cuda("Tesla T4", 2048, 8)
    assert "triton" not in text
    assert "2048x2048" not in text and re.search(r"512x2048xf32", text)


@pytest.mark.parametrize(
    "tokens, head_dim, dtype, masks",
    [
        (2048, 64, jnp.bfloat16, {}),
        (320, 96, jnp.bfloat16, {"window": 100, "soft_cap": 30.0}),
        (128, 256, jnp.float16, {}),
    ],
)
def test_later_gpus_get_the_kernels(tokens, head_dim, dtype, masks):
    text = program_for_cuda("NVIDIA H100 80GB HBM3", tokens, head_dim, dtype, **masks)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3
    assert f"{tokens}x{tokens}" not in text


def test_rows_that_do_not_divide_and_float32_get_chunks():
    assert "triton" not in program_for_cuda("NVIDIA L4", 100, 16)
    assert "triton" not in program_for_cuda("NVIDIA L4", 128, 16, jnp.float32)


H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
CAUSAL, BOTH_WAYS = intervals.causal_reach(None), intervals.both_ways_reach()


@pytest.mark.parametrize(
    "card, one_document, change, expected",
    [
        (H100, True, {}, "cudnn"),
        (L4, True, {"reach": intervals.causal_reach(100)}, "cudnn"),
        (L4, True, {"soft_cap": 30.0}, "kernels"),
        (H100, True, {"soft_cap": 30.0}, "tokamax"),
        (H100, True, {"reach": BOTH_WAYS}, "tokamax"),
        (H100, True, {"head_dim": 256}, "tokamax"),
        (H100, True, {"dtype": jnp.float32}, "chunks"),
        (H100, False, {"tokens": 100}, "chunks"),
        (H100, True, {"tokens": 100}, "cudnn"),
        (H100, False, {}, "kernels"),
        (H100, False, {"head_dim": 128}, "tokamax"),
        ("NVIDIA GB200", False, {}, "tokamax"),
        (H100, False, {"dtype": jnp.float16}, "kernels"),
        (L4, False, {}, "kernels"),
    ],
)
def test_the_choice(card, one_document, change, expected, monkeypatch):
    """Where cuDNN and tokamax are installed, and without them."""
    call = {"reach": CAUSAL, "soft_cap": None, "head_dim": 64, "tokens": 2048} | change
    shape = (2, call["tokens"], 4, call["head_dim"])
    q = k = jax.ShapeDtypeStruct(shape, call.get("dtype", jnp.bfloat16))
    scoring = Scoring(0.3, soft_cap=call["soft_cap"])
    chosen = lambda: gpu_attention.name_for(  # noqa: E731
        q, k, scoring, call["reach"], one_document=one_document
    )
    monkeypatch.setattr(gpu_attention, "device_kind", lambda: card)
    neither = "chunks" if "chunks" == expected or call["tokens"] % 64 else "kernels"
    for there, name in ((False, neither), (True, expected)):
        monkeypatch.setattr(gpu_cudnn, "is_installed", lambda: there)  # noqa: B023
        monkeypatch.setattr(gpu_tokamax, "_fits", lambda *shapes: there)  # noqa: B023
        assert chosen() == name


def test_rows_of_one_document_are_known_to_the_kernels(tmp_path):
    for seen in ("row", "document"):
        run = run_of(tmp_path, f"data.pack.attention={seen}")
        compute = compute_of(run, "gpu", 1, H100)
        for attend in (select.causal_attention(compute), select.attend(compute)):
            options = getattr(attend, "keywords", {})
            assert options == ({"one_document": True} if seen == "row" else {})


@pytest.mark.parametrize("option", ["deterministic_ops", "exclude_nondeterministic_ops"])
def test_sums_in_order_are_not_cudnns(option, tmp_path, monkeypatch):
    """XLA compiles cuDNN's backward pass in that order, and finds it for one layer alone."""
    row, ordered = "data.pack.attention=row", f'train.compiler_options.xla_gpu_{option}="True"'
    one = lambda *said: compute_of(run_of(tmp_path, *said), "gpu", 1, H100).one_document  # noqa: E731
    assert one(row) and not one(row, ordered) and one(row, ordered.replace("True", "False"))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_{option}=true")
    assert not one(row)


def times_computed(name):
    """How often a program with gradients computes what a primitive of this name gives, whose
    results the backward pass reads."""
    kernel = Primitive(name)
    kernel.def_abstract_eval(lambda x: x)
    attend = jax.custom_vjp(lambda x: kernel.bind(x))
    attend.defvjp(lambda x: ((out := kernel.bind(x)), out), lambda out, g: (g * out,))
    kept = REMATS["mlp"].apply(lambda x: jnp.sum(jnp.sin(attend(x))), prevent_cse=True, place=0)
    return str(jax.make_jaxpr(jax.grad(kept))(jnp.ones(4))).count(f"= {name} ")


def test_rematerialization_keeps_cudnns_results():
    """JAX gives them no name of a checkpoint, but its primitive has one."""
    assert times_computed(fused_attention_stablehlo._dot_product_attention_fwd_p_wrapper.name) == 1
    assert times_computed("another") == 2
