"""Tokens per second of lmwright's LoRA step beside PEFT + torch, on this CPU.

    python benchmarks/lora_cpu.py                         # the 135m shape, all contestants
    python benchmarks/lora_cpu.py --shape tiny --quick    # a few minutes

Rank 16 on every matrix of the layers, AdamW with clipping at 1.0 on both sides, random weights.
Run as `train_cpu.py` is: a process for each contestant, rounds interleaved, one at work at a time.
`lmwright-int8-...` and `lmwright-int4-...` keep the base in integers (QLoRA), which torch has no
counterpart for on CPUs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

from train_cpu import REFRESH, ROWS, SHAPES, Step, ask, show

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


def work(name: str, shape: str) -> None:
    """A contestant's process: a line in says how many steps, a line out what they took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    library, *rest = name.split("-")
    started = time.perf_counter()
    step = (lmwright_step if library == "lmwright" else torch_step)(shape, *rest)
    losses = [step(), step()]
    print(json.dumps({"start_s": time.perf_counter() - started}), file=out, flush=True)
    for line in sys.stdin:
        losses += [step() for _ in range(REFRESH)]
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [step() for _ in range(int(line))]
        result = {
            "wall_s": (time.perf_counter() - wall) / int(line),
            "cpu_s": (time.process_time() - cpu) / int(line),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "losses": (losses[0], losses[-1]),
        }
        print(json.dumps(result), file=out, flush=True)


def compare(shape: str, names: list[str], rounds: int, steps: int) -> dict:
    """Results by contestant: lists over rounds."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false")
    workers, results = {}, {}
    try:
        for name in names:
            command = [sys.executable, os.path.abspath(__file__), "--worker", name]
            workers[name] = subprocess.Popen(
                [*command, "--shape", shape], env=env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            results[name] = {"start_s": ask(workers[name])["start_s"], "rounds": []}
            print(f"{shape} {name}: ready after {results[name]['start_s']:.0f} s", flush=True)
        for _ in range(rounds):
            for name in names:
                results[name]["rounds"].append(ask(workers[name], str(steps)))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--quick", action="store_true", help="2 rounds, fp32, no integers")
    parser.add_argument("--only", help="comma-separated contestants: " + ", ".join(CONTESTANTS))
    parser.add_argument("--json", help="file for the raw results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.shape)
        return
    names = args.only.split(",") if args.only else list(CONTESTANTS)
    if args.quick:
        names = [n for n in names if n.endswith("fp32") and "int" not in n]
    results = compare(args.shape, names, 2 if args.quick else args.rounds, args.steps)
    show(args.shape, results)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
