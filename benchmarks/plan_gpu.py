"""`plan` for GPUs beside steps that were measured on one H100 (80 GB, JAX 0.11, November 2026).

    python benchmarks/plan_gpu.py               times by arithmetic
    python benchmarks/plan_gpu.py --compile     and memory by the compiler for CUDA: minutes
    python benchmarks/plan_gpu.py --shapes      memory of many steps, by it and by arithmetic

The measured steps are rows of `benchmarks/train_gpu.py`: AdamW, bf16 products and fp32 weights,
one document a row by cuDNN's attention or 14 by our kernels, `remat` `dots` or `none`. None of them
set a rate of the plan; what attention takes in packed rows follows from times of the kernels alone.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from lmwright.config.run import Run, seq_len_of
from lmwright.formats.open import load_run
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.packed import packed_share

RUN = """
name = "measured"
dir = "runs/measured"
[model]
preset = "llama-135m"
[objective]
kind = "clm"
[optim]
kind = "adamw"
learning_rate = 1e-4
[data]
dir = "data"
[train]
steps = 10
global_batch_size = 8
remat = "dots"
"""
LLAMA_1B = (
    "model.vocab_size=128256", "model.embed_dim=2048", "model.mlp_dim=8192", "model.num_layers=16",
    "model.num_heads=32", "model.num_kv_heads=8", "model.head_dim=64", "model.seq_len=2048",
)  # fmt: skip
PACKED = "135M, 2 x 8,192, 14 documents"
ONE_DOCUMENT = "data.pack.attention=row"
# milliseconds of a step, GiB at its peak
MEASURED: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "135M, 8 x 2,048": (56.06, 9.201, ("model.seq_len=2048", ONE_DOCUMENT)),
    PACKED: (
        57.84, 7.575, ("model.seq_len=8192", "train.global_batch_size=2"),
    ),
    "1B, 4 x 2,048": (135.3, 24.07, (*LLAMA_1B, "train.global_batch_size=4", ONE_DOCUMENT)),
    "1B, LoRA rank 16, 4 x 2,048": (
        104.4, 11.82, (*LLAMA_1B, "train.global_batch_size=4", "lora.rank=16", ONE_DOCUMENT),
    ),
    "135M, 8 x 2,048, none": (
        54.55, 11.85, ("model.seq_len=2048", "train.remat=none", ONE_DOCUMENT),
    ),
    "1B, 4 x 2,048, none": (
        133.6, 28.88, (*LLAMA_1B, "train.global_batch_size=4", "train.remat=none", ONE_DOCUMENT),
    ),
    "1B, 8 x 2,048, none": (
        244.6, 41.15, (*LLAMA_1B, "train.global_batch_size=8", "train.remat=none", ONE_DOCUMENT),
    ),
    "1B, LoRA rank 16, none": (
        103.1, 14.82, (
            *LLAMA_1B, "train.global_batch_size=4", "lora.rank=16", "train.remat=none",
            ONE_DOCUMENT,
        ),
    ),
}  # fmt: skip
# vocabulary, width, mlp, layers, heads, kv heads, head dim, tokens of a row, rows
SHAPES = {
    "6 layers of 512": (8192, 512, 1536, 6, 8, 2, 64, 1024, 8),
    "8 layers of 576": (49152, 576, 1536, 8, 9, 3, 64, 2048, 8),
    "4 layers of 1,024": (32000, 1024, 4096, 4, 16, 8, 64, 2048, 4),
    "12 layers of 768": (16384, 768, 2048, 12, 12, 4, 64, 1024, 8),
    "50 layers of 256, scanned": (8192, 256, 768, 50, 4, 2, 64, 512, 8),
    "the 135M": (49152, 576, 1536, 30, 9, 3, 64, 2048, 8),
}
SIX_LAYERS = (16384, 768, 2048, 6, 12, 4, 64, 1024, 16)
GEMMA = ("model.preset=gemma3-1b", "model.num_layers=6", "model.vocab_size=32768")
ROWS_OF_2048 = ("model.seq_len=2048",)
# compiled after the rules of arithmetic were written
HELD_OUT = {
    "6 layers, 2 microbatches": ("gpu:h100x1", 16, SIX_LAYERS, ("train.num_microbatches=2",)),
    "6 layers on 8 cards": ("gpu:h100x8", 64, SIX_LAYERS, ()),
    "6 layers of gemma3-1b": ("gpu:h100x1", 4, None, (*GEMMA, *ROWS_OF_2048)),
    "llama-1b": ("gpu:h100x1", 24, None, ("model.preset=llama-1b", *ROWS_OF_2048)),
    "llama-3b": ("gpu:h100x1", 4, None, ("model.preset=llama-3b", *ROWS_OF_2048)),
    "llama-8b on 8 cards": ("gpu:h100x8", 32, None, ("model.preset=llama-8b", *ROWS_OF_2048)),
}
EXPERTS_OF_8 = ("mesh.expert=8", "mesh.fsdp=1", "model.num_layers=2", "model.seq_len=4096")
EXPERTS_OF_4 = ("mesh.expert=4", "mesh.fsdp=2", "model.num_layers=2", "model.seq_len=4096")
# rows that experts of other cards compute; the first set how many arithmetic counts
EXPERTS = {
    "2 layers of OLMoE": ("block", 8, ("model.preset=olmoe-1b-7b", *EXPERTS_OF_8)),
    "2 layers of OLMoE, 4 ways": ("none", 16, ("model.preset=olmoe-1b-7b", *EXPERTS_OF_4)),
    "2 layers of Mixtral": ("block", 8, ("model.preset=mixtral-8x7b", *EXPERTS_OF_8)),
}
POLICIES = {"llama-1b": ("mlp",), "llama-3b": ("gate",), "llama-8b on 8 cards": ("dots",)}
FIELDS = (
    "model.vocab_size", "model.embed_dim", "model.mlp_dim", "model.num_layers", "model.num_heads",
    "model.num_kv_heads", "model.head_dim", "model.seq_len", "train.global_batch_size",
)  # fmt: skip
GIB = 2**30


def times(path: Path, machine: Machine) -> None:
    """Prints the measured and the predicted times of a step."""
    print(f"{'step':<29} {'measured':>10} {'predicted':>10} {'ratio':>6}")
    for name, (measured, _, changes) in MEASURED.items():
        run, on = load_run(path, changes), machine
        if name == PACKED:
            documents = np.arange(seq_len_of(run))[None] * 14 // seq_len_of(run)
            on = replace(machine, packed_share=packed_share(documents, [None]))
        quick = Quick.of(run, on)
        predicted = 1e3 * quick.step_s
        print(
            f"{name:<29} {measured:>7.1f} ms {predicted:>7.1f} ms {predicted / measured:>6.2f}, "
            f"give or take {quick.error_share:.0%}"
        )


def peaks(path: Path, machine: Machine) -> None:
    """Prints the measured peaks of memory beside those of compiled programs."""
    print(
        f"\n{'GiB at the peak':<29} {'measured':>10} {'compiled':>10} {'ratio':>6} {'--quick':>10}"
    )
    for name, (_, measured, changes) in MEASURED.items():
        run = load_run(path, changes)
        compiled = compile_for(run, machine).peak_bytes / GIB
        quick = Quick.of(run, machine).memory.peak / GIB
        print(
            f"{name:<29} {measured:>10.3f} {compiled:>10.3f} {measured / compiled:>6.3f} "
            f"{quick:>10.3f}",
            flush=True,
        )


def shapes(path: Path, machine: Machine) -> None:
    """Prints the memory of steps by the compiler and by arithmetic."""
    print(f"{'GiB at the peak':<27} {'remat':<6} {'compiled':>9} {'--quick':>9} {'ratio':>6}")
    for name, sizes in SHAPES.items():
        for remat, lora in product(("none", "dots", "block"), ((), ("lora.rank=16",))):
            if lora and (remat == "dots" or sizes[1] != 1024):
                continue
            words = (*said(sizes), f"train.remat={remat}", *lora)
            show_peak(name + ", LoRA" * bool(lora), load_run(path, words), machine)
    for name, (on, rows, sizes, more) in HELD_OUT.items():
        for remat in POLICIES.get(name, ("none", "block")):
            words = said(sizes) if sizes else []
            words += [*more, f"train.remat={remat}", f"train.global_batch_size={rows}"]
            show_peak(name, load_run(path, words), parse_machine(on))
    for name, (remat, rows, words) in EXPERTS.items():
        words = (*words, f"train.remat={remat}", f"train.global_batch_size={rows}")
        show_peak(name, load_run(path, words), parse_machine("gpu:h100x8"))


def said(sizes: Sequence[int]) -> list[str]:
    """Overrides that set the sizes of a model and its rows."""
    return [f"{field}={size}" for field, size in zip(FIELDS, sizes, strict=True)]


def show_peak(name: str, run: Run, machine: Machine) -> None:
    """Prints the memory of a step by the compiler and by arithmetic."""
    compiled = compile_for(run, machine).peak_bytes / GIB
    quick = Quick.of(run, machine).memory.peak / GIB
    print(
        f"{name:<27} {run.train.remat:<6} {compiled:>9.3f} {quick:>9.3f} {quick / compiled:>6.3f}",
        flush=True,
    )


def main() -> None:
    machine = parse_machine("gpu:h100x1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(RUN)
        if "--shapes" in sys.argv:
            shapes(path, machine)
            return
        times(path, machine)
        if "--compile" in sys.argv:
            peaks(path, machine)


if __name__ == "__main__":
    main()
