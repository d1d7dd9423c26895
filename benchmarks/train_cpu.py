"""Tokens per second of lmwright's train step beside transformers + torch, on this CPU.

    python benchmarks/train_cpu.py                       # both shapes, all contestants
    python benchmarks/train_cpu.py --shape tiny --quick  # a few minutes

Same model, same tokens per step, AdamW with clipping at 1.0 on both sides. Run as
`contestants.py` says.
"""

from contestants import Step, arguments, run, work

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


def lmwright_step(shape: str, precision: str) -> Step:
    """The real train step, compiled and fed as `lmwright train` does."""
    import jax
    import numpy as np

    from lmwright.config.run import Data, Run, Train
    from lmwright.core.contract import Batch
    from lmwright.core.sharding import batch_sharding
    from lmwright.models.llama import Llama
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.program.plan import resolve
    from lmwright.program.state import init_state
    from lmwright.program.step import make_step

    run = Run(
        name="benchmark",
        dir="unused",
        model=Llama(**SHAPES[shape]),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-3, clip_norm=1.0),
        data=Data(dir="unused"),
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
    """The same in torch: fused AdamW, autocast for bf16, compiled as a whole or eager."""
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
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, m["vocab_size"], (ROWS[shape], m["seq_len"]))
    forward = torch.compile(model) if mode == "compile" else model

    def one() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    names = [n for n in CONTESTANTS if n.endswith("fp32") or not args.quick]
    tokens = {shape: ROWS[shape] * size["seq_len"] for shape, size in SHAPES.items()}
    run(args, names, {"tiny": (8, tokens["tiny"]), "135m": (3, tokens["135m"])})


if __name__ == "__main__":
    main()
