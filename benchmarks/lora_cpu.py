"""Tokens per second of lmwright's LoRA step beside PEFT + torch, on this CPU.

    python benchmarks/lora_cpu.py                         # the 135m shape, all contestants
    python benchmarks/lora_cpu.py --shape tiny --quick    # a few minutes

Rank 16 on every matrix of the layers, AdamW with clipping at 1.0 on both sides, random weights.
Run as `contestants.py` says.
`lmwright-int8-...` and `lmwright-int4-...` keep the base in integers (QLoRA), which torch has no
counterpart for on CPUs.
"""

from contestants import Step, compete, lmwright_steps, torch_steps
from train_cpu import ROWS, SHAPES, llama_rows, shapes, torch_inputs

RANK, ALPHA = 16, 32
CONTESTANTS = (
    "lmwright-same-fp32", "lmwright-same-bf16", "lmwright-int8-fp32", "lmwright-int4-fp32",
    "torch-eager-fp32", "torch-eager-bf16", "torch-compile-fp32", "torch-compile-bf16",
)  # fmt: skip


def lmwright_step(shape: str, base: str, precision: str) -> Step:
    """A step over a base in the precision of the step, or in integers."""
    from lmwright.config.run import Data, Run, Train
    from lmwright.models.llama import Llama
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.program.lora_section import LowRank

    storage = precision if base == "same" else base
    run = Run(
        name="benchmark",
        dir="unused",
        model=Llama(**SHAPES[shape]),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-3, clip_norm=1.0),
        data=Data(dir="unused"),
        lora=LowRank(base=storage, rank=RANK, alpha=float(ALPHA)),
        train=Train(steps=10_000, global_batch_size=ROWS[shape], precision=precision),
    )
    return lmwright_steps(run, **llama_rows(shape))


def torch_step(shape: str, mode: str, precision: str) -> Step:
    """PEFT in torch: weights frozen in the step's precision, float32 factors."""
    import peft
    import torch

    model, inputs = torch_inputs(shape)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)  # factors are float32 (autocast_adapter_dtype)
    return torch_steps(model, mode, precision, inputs, lr=1e-3)


if __name__ == "__main__":
    compete(
        __doc__.split("\n")[0], shapes({"tiny": 3, "135m": 3}), CONTESTANTS,
        [n for n in CONTESTANTS if n.endswith("fp32") and "int" not in n],
        lmwright=lmwright_step, torch=torch_step, shape="135m",
    )  # fmt: skip
