"""Twenty steps of `lmwright train` on a card beside those of a CPU, for every family, objective and
way of LoRA."""

import os

import pytest

from tests.golden.cases import CASES
from tests.golden.curves import ROOT, differences, train_apart
from tests.golden.test_curves import GOLDEN

pytestmark = pytest.mark.slow

GROUPS = [list(CASES)[first::12] for first in range(12)]  # a process each
CUDA = {
    "JAX_PLATFORMS": "cuda", "XLA_FLAGS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip
# as kernels take it: bfloat16, rows of a multiple of 64 tokens
NARROW = ("train.precision=bf16", "data.pack.seq_len=128", "model.seq_len=128")
KINDS = (
    "family llama", "family gemma", "family modernbert", "family qwen3-moe", "family xlstm",
    "family bitnet", "family deberta", "objective diffusion", "objective sft", "objective dpo",
    "objective distill", "lora one", "lora three", "lora dora", "optim muon",
)  # fmt: skip


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_in_float32(names):
    """By XLA alone, which takes float32; products as exact as the card can."""
    exact = CUDA | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    found = train_apart(ROOT / "src", names, **exact)
    assert not differences(GOLDEN, found, 1e-3)


@pytest.mark.parametrize("names", [KINDS[first::8] for first in range(8)], ids=lambda n: n[0])
def test_in_bfloat16(names):
    """By the kernels that training takes. Losses differ by roundings alone."""
    here = train_apart(ROOT / "src", names, NARROW, PYTHONPATH=CUDA["PYTHONPATH"])
    there = train_apart(ROOT / "src", names, NARROW, **CUDA)
    losses = lambda curves: {  # noqa: E731
        case: {name: values for name, values in curve.items() if name.endswith(".loss")}
        for case, curve in curves.items()
    }
    assert not differences(losses(here), losses(there), 2e-2)
