"""Tokens per second of lmwright's train step beside transformers + torch, on this CPU.

    python benchmarks/train_cpu.py                       # both shapes, all contestants
    python benchmarks/train_cpu.py --shape tiny --quick  # a few minutes

Same model, same tokens per step, AdamW with clipping at 1.0 on both sides. Run as
`contestants.py` says.
"""

from typing import Any

import numpy as np
from contestants import (
    Step,
    compete,
    lmwright_steps,
    random_rows,
    torch_llama,
    torch_steps,
)

SHAPES = {
    "tiny": dict(
        vocab_size=4096, embed_dim=256, mlp_dim=1024, num_layers=4, num_heads=8,
        num_kv_heads=4, head_dim=32, seq_len=512,
    ),
    "135m": dict(
        vocab_size=49152, embed_dim=576, mlp_dim=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, seq_len=512,
    ),
}  # fmt: skip
ROWS = {"tiny": 8, "135m": 2}
CONTESTANTS = (
    "lmwright-fp32", "lmwright-bf16", "torch-eager-fp32", "torch-eager-bf16",
    "torch-compile-fp32", "torch-compile-bf16",
)  # fmt: skip


def llama_rows(shape: str) -> dict[str, np.ndarray]:
    """Rows of one document each."""
    return random_rows(SHAPES[shape]["vocab_size"], ROWS[shape], SHAPES[shape]["seq_len"])


def torch_inputs(shape: str) -> tuple[Any, dict[str, Any]]:
    """The model in transformers, and its inputs."""
    import torch

    m = SHAPES[shape]
    model = torch_llama(m, m["seq_len"])
    tokens = torch.randint(0, m["vocab_size"], (ROWS[shape], m["seq_len"]))
    return model, {"input_ids": tokens, "labels": tokens}


def lmwright_step(shape: str, precision: str) -> Step:
    """A step of full training."""
    from lmwright.config.run import Data, Run, Train
    from lmwright.models.llama import Llama
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS

    run = Run(
        name="benchmark",
        dir="unused",
        model=Llama(**SHAPES[shape]),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-3, clip_norm=1.0),
        data=Data(dir="unused"),
        train=Train(steps=10_000, global_batch_size=ROWS[shape], precision=precision),
    )
    return lmwright_steps(run, **llama_rows(shape))


def torch_step(shape: str, mode: str, precision: str) -> Step:
    """The same in torch."""
    model, inputs = torch_inputs(shape)
    return torch_steps(model, mode, precision, inputs, lr=1e-3, weight_decay=0.1)


def shapes(steps: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Steps a round and tokens a step of each shape."""
    return {name: (n, ROWS[name] * SHAPES[name]["seq_len"]) for name, n in steps.items()}


if __name__ == "__main__":
    compete(
        __doc__.split("\n")[0], shapes({"tiny": 8, "135m": 3}), CONTESTANTS,
        [n for n in CONTESTANTS if n.endswith("fp32")], lmwright=lmwright_step, torch=torch_step,
    )  # fmt: skip
