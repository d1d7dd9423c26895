"""Tokens per second of lmwright's LoRA step beside PEFT + torch, on this CPU.

    python benchmarks/lora_cpu.py                         # the 135m shape, all contestants
    python benchmarks/lora_cpu.py --shape tiny --quick    # a few minutes

Rank 16 on every matrix of the layers, AdamW with clipping at 1.0 on both sides, random weights.
Run as `contestants.py` says.
`lmwright-int8-...` and `lmwright-int4-...` keep the base in integers (QLoRA), which torch has no
counterpart for on CPUs.
"""

from contestants import Step, arguments, run, work
from train_cpu import ROWS, SHAPES

RANK, ALPHA = 16, 32
CONTESTANTS = (
    "lmwright-same-fp32", "lmwright-same-bf16", "lmwright-int8-fp32", "lmwright-int4-fp32",
    "torch-eager-fp32", "torch-eager-bf16", "torch-compile-fp32", "torch-compile-bf16",
)  # fmt: skip


def lmwright_step(shape: str, base: str, precision: str) -> Step:
    """The real train step over a base in the precision of the step, or in integers."""
    import jax
    import numpy as np

    from lmwright.config.run import Data, Run, Train
    from lmwright.core.contract import Batch
    from lmwright.core.sharding import batch_sharding
    from lmwright.models.llama import Llama
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.program.lora_section import LowRank
    from lmwright.program.plan import resolve
    from lmwright.program.state import init_state
    from lmwright.program.step import make_step

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
    plan = resolve(run, jax.devices()[:1])
    size = (1, ROWS[shape], plan.seq_len)
    rng = np.random.default_rng(0)
    batch = Batch(
        tokens=rng.integers(0, run.model.vocab_size, size, dtype=np.int32),
        segment_ids=np.ones(size, np.int32),
        positions=np.broadcast_to(np.arange(plan.seq_len, dtype=np.int32), size),
        loss_weight=np.ones(size, np.float32),
    )
    jax.set_mesh(plan.mesh)
    batch = jax.device_put(batch, batch_sharding(plan.mesh, leading=1))
    step, state = make_step(plan), init_state(plan)

    def one() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])  # waits

    return one


def torch_step(shape: str, mode: str, precision: str) -> Step:
    """PEFT in torch: weights frozen in the step's precision, fused AdamW on the factors."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    m = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=m["vocab_size"], hidden_size=m["embed_dim"], intermediate_size=m["mlp_dim"],
        num_hidden_layers=m["num_layers"], num_attention_heads=m["num_heads"],
        num_key_value_heads=m["num_kv_heads"], head_dim=m["head_dim"],
        max_position_embeddings=m["seq_len"], tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)  # factors are float32 (autocast_adapter_dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(0, m["vocab_size"], (ROWS[shape], m["seq_len"]))
    forward = torch.compile(model) if mode == "compile" else model

    def one() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return one


def main() -> None:
    args = arguments(__doc__.split("\n")[0], [*SHAPES], CONTESTANTS).parse_args()
    if args.worker:
        library, *rest = args.worker.split("-")
        make = lmwright_step if library == "lmwright" else torch_step
        work(lambda: make(args.shape, *rest))
        return
    plain = [n for n in CONTESTANTS if n.endswith("fp32") and "int" not in n]
    tokens = {shape: ROWS[shape] * size["seq_len"] for shape, size in SHAPES.items()}
    run(args, plain if args.quick else CONTESTANTS, {name: (3, n) for name, n in tokens.items()})


if __name__ == "__main__":
    main()
