"""The train step compiled by XLA's compiler for CUDA, for cards that are not here."""

import importlib.util
import re

import pytest

from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler.gpu import has_cuda_compiler
from tests.planner.runs import run_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_cuda_compiler(), reason="needs JAX's plugin for CUDA (cuda13)"),
]
SMALL = (
    "model.num_layers=2", "model.embed_dim=256", "model.mlp_dim=384", "model.num_heads=4",
    "model.num_kv_heads=2", "model.head_dim=64", "model.seq_len=1024", "model.vocab_size=4096",
    "train.global_batch_size=8",
)  # fmt: skip

TRITON = "__gpu$xla.gpu.triton"
has_tokamax = importlib.util.find_spec("tokamax") is not None
has_cudnn = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"))


def calls(found, target, where=""):
    """Calls of a kernel in a compiled step, by functions whose name begins so."""
    ours = (line for line in found.hlo.splitlines() if f'custom_call_target="{target}"' in line)
    return sum(f"jit({where}" in line for line in ours)


@pytest.mark.parametrize(
    "name", ["gpu:l4x1", "gpu:rtx3090x1", "gpu:rtx5090x1", "gpu:a100x1", "gpu:h100x8"]
)
def test_a_step_compiles_with_the_kernels(name, tmp_path):
    machine = parse_machine(name)
    found = aot.compile_for(run_of(tmp_path, *SMALL, "train.remat=block"), machine)
    assert found.fits and found.limit_bytes == machine.usable_bytes
    given = found.weights_bytes + found.optimizer_bytes
    assert given < found.peak_bytes < given + 2**30
    # of two layers: forward, again for the backward pass, and its two
    assert calls(found, TRITON) == 2 * 4
    assert not re.search(r"\[(\d+,)+1024,1024\]", found.hlo)  # no scores of all pairs
    if machine.num_devices > 1:
        assert "all-gather" in found.hlo or "all-reduce" in found.hlo


def behind_products(hlo, collective):
    """For each of these collectives of the scheduled step: True if a product lies between its start
    and its end."""
    step = re.search(r"^ENTRY .*?^}", hlo, re.S | re.M)[0].splitlines()
    products = [bool(re.search(r"^\s*%gemm_fusion\S* =|__cublas", line)) for line in step]
    name = re.compile(rf"(%[\w.-]+) = .* {collective}-(start|done)\((%[\w.-]+)")
    at = {}
    for number, line in enumerate(step):
        if found := name.search(line):
            at[found[1] if found[2] == "start" else found[3], found[2]] = number
    starts = [start for start, kind in at if kind == "start"]
    return [any(products[at[start, "start"] : at[start, "done"]]) for start in starts]


def test_gradients_are_summed_behind_products(tmp_path):
    """Most sums, and most gathers of weights, have a product between their start and their end."""
    wide = ("model.num_layers=4", "model.embed_dim=2048", "model.mlp_dim=4096")
    run = run_of(tmp_path, *SMALL, *wide, "train.remat=none", "mesh.fsdp=8")
    hlo = aot.compile_for(run, parse_machine("gpu:h100x8")).hlo
    gathers, sums = (behind_products(hlo, name) for name in ("all-gather", "reduce-scatter"))
    assert len(gathers) >= 4 * 2 and sum(gathers) > len(gathers) / 2
    assert len(sums) >= 4 * 2 and sum(sums) > len(sums) * 2 / 3


def test_more_is_kept_without_remat(tmp_path):
    """The compiler, not arithmetic, gives the memory."""
    machine = parse_machine("gpu:h100x1")
    peak = {
        remat: aot.compile_for(run_of(tmp_path, *SMALL, f"train.remat={remat}"), machine).peak_bytes
        for remat in ("none", "block")
    }
    assert peak["block"] < peak["none"]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_blocks_fit_the_shared_memory_of_a_small_card(head_dim, tmp_path):
    run = run_of(tmp_path, *SMALL, f"model.head_dim={head_dim}", "model.num_layers=1")
    assert aot.compile_for(run, parse_machine("gpu:l4x1")).fits


@pytest.mark.skipif(not has_cudnn, reason="needs cuDNN (cuda13)")
@pytest.mark.parametrize(
    ("name", "window"), [("gpu:a100x1", "none"), ("gpu:h100x8", "none"), ("gpu:h100x1", "256")]
)
def test_rows_of_one_document_are_cudnns(name, window, tmp_path):
    own = (f"model.window={window}", "train.remat=mlp", "data.pack.attention=row")
    run = run_of(tmp_path, *SMALL, *own)
    found = aot.compile_for(run, parse_machine(name))
    assert found.fits
    assert calls(found, "__cudnn$fmhaSoftmax") == calls(found, "__cudnn$fmhaSoftmaxBackward") == 2


def test_matrices_multiply_8_bits(tmp_path):
    """Of two layers with seven matrices: forward, and two products of gradients."""
    run = run_of(tmp_path, *SMALL, "train.remat=none", "train.precision=fp8")
    hlo = aot.compile_for(run, parse_machine("gpu:h100x1")).hlo
    products = [kinds for block in hlo.split("\n\n") for kinds in operands_of_products(block)]
    gradients = [kinds for kinds in products if "f8e5m2" in kinds]
    assert len(gradients) == 2 * 7 * 2 and set(map(frozenset, gradients)) == {frozenset(NARROW)}
    # products of one input may be one
    assert 2 * 3 <= products.count(("f8e4m3fn", "f8e4m3fn")) <= 2 * 7


NARROW = ("f8e4m3fn", "f8e5m2")


def operands_of_products(block):
    """Types of both operands of each product of a computation's text."""
    types = dict(re.findall(r"%?([\w.\-]+) = (\w+)\[", block))
    for pair in re.findall(r" dot\(%?([\w.\-]+), %?([\w.\-]+)\)", block):
        yield tuple(types[name] for name in pair)


# devices along the axes of a mesh of 8, collectives beside those of fsdp, kernels of attention
MESHES = {
    "fsdp": (("mesh.fsdp=8",), ("all-gather", "reduce-scatter"), 8),
    "data": (("mesh.data=8", "mesh.fsdp=1"), ("all-reduce",), 8),
    "tensor": (("mesh.tensor=2", "mesh.fsdp=4"), ("all-gather", "reduce-scatter"), 8),
    # a ring goes by chunks of queries in XLA
    "ring": (("mesh.context=2", "mesh.fsdp=4"), ("collective-permute",), 0),
    "heads traded": (
        ("mesh.context=2", "mesh.fsdp=4", "train.context_attention=all_to_all"), ("all-to-all",), 8
    ),
    # scanned in stages: one layer's four
    "stage": (
        ("mesh.stage=2", "mesh.fsdp=4", "train.num_microbatches=2"), ("collective-permute",), 4
    ),
    "expert": (("mesh.expert=4", "mesh.fsdp=2"), ("all-to-all",), 16),
    "places": (
        ("mesh.expert=4", "mesh.fsdp=2", "model.experts.capacity_factor=1.25"), ("all-to-all",), 16
    ),
}  # fmt: skip


@pytest.mark.parametrize("axes", MESHES)
def test_meshes_of_several_cards(axes, tmp_path):
    words, collectives, kernels = MESHES[axes]
    moe = any(word.startswith("mesh.expert") for word in words)
    shape = {"preset": "moe-6m"} if moe else {}
    words = words if moe else (*SMALL, *words)
    run = run_of(tmp_path, *words, "train.remat=block", **shape, batch=16)
    found = aot.compile_for(run, parse_machine("gpu:h100x8"))
    assert found.fits and found.mesh == found.mesh | sizes_of(words)
    for name in collectives:
        assert re.search(rf" {name}(-start)?\(", found.hlo), name
    assert calls(found, TRITON, "_attention") == kernels


@pytest.mark.skipif(not has_tokamax, reason="needs tokamax")
def test_wide_heads_take_tokamax_on_hopper(tmp_path):
    run = run_of(tmp_path, *SMALL, "model.head_dim=128", "train.remat=block")
    assert calls(aot.compile_for(run, parse_machine("gpu:h100x1")), "mosaic_gpu_v2") == 2 * 4


def sizes_of(words):
    """The sizes of mesh axes that words like `mesh.fsdp=8` set."""
    pairs = (w.removeprefix("mesh.").split("=") for w in words if w.startswith("mesh."))
    return {axis: int(size) for axis, size in pairs}
