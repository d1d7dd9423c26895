"""Tokens per second of lmwright's train step beside transformers + torch, on this CPU.

    python benchmarks/train_cpu.py                       # both shapes, all contestants
    python benchmarks/train_cpu.py --shape tiny --quick  # a few minutes

Same model, same tokens per step, AdamW with clipping at 1.0 on both sides. Each contestant
lives in its own process with its own environment; rounds are interleaved and one process
works at a time; nobody gets thread or memory settings that the others lack. Wall time is what
counts; CPU seconds are printed beside it because they suffer less from other work on the machine.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

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

# a virtual machine may take an idle process's memory away; the first steps after a pause, in
# which others had their round, pay for getting it back and are not counted
REFRESH = 3

Step = Callable[[], float]


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


def work(name: str, shape: str) -> None:
    """A contestant's process: a line in says how many steps, a line out what they took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    library, *rest = name.split("-")
    started = time.perf_counter()
    step = lmwright_step(shape, *rest) if library == "lmwright" else torch_step(shape, *rest)
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


def start(name: str, shape: str) -> subprocess.Popen:
    """A contestant, warm: compiled and two steps in."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false")
    command = [sys.executable, os.path.abspath(__file__), "--worker", name, "--shape", shape]
    worker = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    return worker


def ask(worker: subprocess.Popen, line: str | None = None) -> dict:
    """The worker's next answer. Raises RuntimeError if it died."""
    if line is not None:
        print(line, file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"a contestant ended early: {' '.join(worker.args[-4:])}")
    return json.loads(answer)


def compare(shape: str, names: list[str], rounds: int, steps: int) -> dict:
    """Results by contestant: lists over rounds."""
    workers, results = {}, {}
    try:
        for name in names:
            workers[name] = start(name, shape)
            ready = ask(workers[name])
            results[name] = {"start_s": ready["start_s"], "rounds": []}
            print(f"{shape} {name}: ready after {ready['start_s']:.0f} s", flush=True)
        for _ in range(rounds):
            for name in names:
                results[name]["rounds"].append(ask(workers[name], str(steps)))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def show(shape: str, results: dict) -> None:
    """Medians, spread, and ratios to torch's best."""
    tokens = ROWS[shape] * SHAPES[shape]["seq_len"]
    speed = {n: [tokens / r["wall_s"] for r in v["rounds"]] for n, v in results.items()}
    cpu = {n: statistics.median(r["cpu_s"] for r in v["rounds"]) for n, v in results.items()}
    median = {n: statistics.median(v) for n, v in speed.items()}
    torch_names = [n for n in results if n.startswith("torch")]
    best = max(torch_names, key=median.get, default=None)
    least = min(torch_names, key=cpu.get, default=None)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\n{shape}: {tokens} tokens a step; load average of the machine {load}")
    head = ("", "tok/s", "min-max", "CPU-s/step", "peak GiB", "x torch's best", "x by CPU-s")
    rows = [head]
    for n in results:
        rows.append((
            n, f"{median[n]:.0f}", f"{min(speed[n]):.0f}-{max(speed[n]):.0f}", f"{cpu[n]:.2f}",
            f"{results[n]['rounds'][-1]['peak_bytes'] / 2**30:.2f}",
            f"{median[n] / median[best]:.2f}" if best else "",
            f"{cpu[least] / cpu[n]:.2f}" if least else "",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))
    if best:
        print(f"torch's best: {best} by wall time, {least} by CPU seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps a round (8 tiny, 3 135m)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, fp32 only")
    parser.add_argument("--only", help="comma-separated contestants: " + ", ".join(CONTESTANTS))
    parser.add_argument("--json", help="file for the raw results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.shape)
        return
    names = args.only.split(",") if args.only else list(CONTESTANTS)
    if args.quick:
        names = [n for n in names if n.endswith("fp32")]
    every = {}
    for shape in SHAPES if args.shape == "all" else [args.shape]:
        steps = args.steps or {"tiny": 8, "135m": 3}[shape]
        rounds = 2 if args.quick else args.rounds
        every[shape] = compare(shape, names, rounds, steps)
        show(shape, every[shape])
    if args.json:
        with open(args.json, "w") as file:
            json.dump(every, file, indent=1)


if __name__ == "__main__":
    main()
