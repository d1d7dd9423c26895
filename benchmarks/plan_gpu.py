"""`plan --quick` beside steps that were measured on one H100 (80 GB, JAX 0.11, November 2026).

    python benchmarks/plan_gpu.py

The measured steps had cuDNN's attention, layers unrolled, one document a row, AdamW, bf16 products
and fp32 weights. None of them set a rate of the plan. Our own attention kernels are not measured.
"""

import tempfile
from pathlib import Path

from lmwright.formats.open import load_run
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick

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
"""
LLAMA_1B = (
    "model.vocab_size=128256", "model.embed_dim=2048", "model.mlp_dim=8192", "model.num_layers=16",
    "model.num_heads=32", "model.num_kv_heads=8", "model.head_dim=64", "model.seq_len=2048",
)  # fmt: skip
MEASURED = {  # milliseconds a step
    "135M, 8 x 2,048": (59.8, ("model.seq_len=2048",)),
    "135M, 2 x 8,192": (89.0, ("model.seq_len=8192", "train.global_batch_size=2")),
    "1B, 4 x 2,048": (137.9, (*LLAMA_1B, "train.global_batch_size=4")),
    "1B, 8 x 2,048": (255.6, LLAMA_1B),
    "1B, LoRA rank 16, 4 x 2,048": (
        113.5,
        (*LLAMA_1B, "train.global_batch_size=4", "lora.rank=16"),
    ),
}


def main() -> None:
    machine = parse_machine("gpu:h100x1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(RUN)
        print(f"{'step':<29} {'measured':>10} {'predicted':>10} {'ratio':>6}")
        for name, (measured, changes) in MEASURED.items():
            predicted = 1e3 * Quick.of(load_run(path, changes), machine).step_s
            ratio = predicted / measured
            print(f"{name:<29} {measured:>7.1f} ms {predicted:>7.1f} ms {ratio:>6.2f}")


if __name__ == "__main__":
    main()
