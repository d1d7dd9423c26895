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

HOPPER = ("gpu:h100x1", "gpu:h100x8", "gpu:b200x1")
has_tokamax = importlib.util.find_spec("tokamax") is not None
has_cudnn = importlib.util.find_spec("nvidia.cudnn") is not None


def calls(found, target):
    """Calls of a kernel in a compiled step."""
    return found.hlo.count(f'custom_call_target="{target}"')


@pytest.mark.parametrize("name", ["gpu:l4x1", "gpu:a100x1", "gpu:h100x8"])
def test_a_step_compiles_with_the_kernels(name, tmp_path):
    machine = parse_machine(name)
    found = aot.compile_for(run_of(tmp_path, *SMALL, "train.remat=block"), machine)
    assert found.fits and found.limit_bytes == machine.usable_bytes
    given = found.weights_bytes + found.optimizer_bytes
    assert given < found.peak_bytes < given + 2**30
    # of two layers: forward, again for the backward pass, and its two
    tokamax = has_tokamax and name in HOPPER
    assert calls(found, "mosaic_gpu_v2" if tokamax else "__gpu$xla.gpu.triton") == 2 * 4
    assert not re.search(r"\[(\d+,)+1024,1024\]", found.hlo)  # no scores of all pairs
    if machine.num_devices > 1:
        assert "all-gather" in found.hlo or "all-reduce" in found.hlo


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
@pytest.mark.parametrize("name", ["gpu:a100x1", "gpu:h100x8"])
def test_rows_of_one_document_are_cudnns(name, tmp_path):
    run = run_of(tmp_path, *SMALL, "train.remat=mlp", "data.pack.attention=row")
    found = aot.compile_for(run, parse_machine(name))
    assert found.fits
    assert calls(found, "__cudnn$fmhaSoftmax") == calls(found, "__cudnn$fmhaSoftmaxBackward") == 2
