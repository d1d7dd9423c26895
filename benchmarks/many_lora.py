"""What a step costs with 1, 2, 4, 8 adapters on one base, at the same total rows, on this CPU.

    python benchmarks/many_lora.py                 # tiny shape: step time and memory by N
    python benchmarks/many_lora.py --torch         # and N separate PEFT runs of the same rows

Each N lives in its own process; rounds are interleaved and one process works at a time. The
rows of a step are the same for all N. Wall times of a busy machine scatter; CPU seconds are
printed beside them.
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
        num_kv_heads=4, head_dim=32, seq_len=256,
    ),
    "135m": dict(
        vocab_size=49152, embed_dim=576, mlp_dim=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, seq_len=256,
    ),
}  # fmt: skip
ROWS, RANK = 8, 16
COUNTS = (1, 2, 4, 8)
MEMORY = ("adapter_bytes", "program_bytes")
REFRESH = 2  # steps after a pause that are not counted: an idle process may lose its memory

Step = Callable[[], float]


def lmwright_step(shape: str, count: int) -> tuple[Step, dict]:
    """The real train step of `count` adapters, and what the compiler says of its memory."""
    import jax
    import numpy as np

    from lmwright.config.run import Data, Run, Train
    from lmwright.core.contract import Batch
    from lmwright.core.sharding import batch_sharding
    from lmwright.core.weight import nbytes
    from lmwright.models.llama import Llama
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.program.lora_section import Adapter, LowRank
    from lmwright.program.plan import resolve
    from lmwright.program.state import init_state
    from lmwright.program.step import make_step

    names = tuple(Adapter(name=f"a{i}", rank=RANK) for i in range(count))
    run = Run(
        name="benchmark",
        dir="unused",
        model=Llama(**SHAPES[shape]),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-3),
        data=Data(dir="unused"),
        lora=LowRank(base="fp32", rank=RANK, adapters=names),
        train=Train(steps=10_000, global_batch_size=ROWS, precision="fp32"),
    )
    plan = resolve(run, jax.devices()[:1])
    size = (1, ROWS, plan.seq_len)
    rng = np.random.default_rng(0)
    batch = Batch(
        tokens=rng.integers(0, run.model.vocab_size, size, dtype=np.int32),
        segment_ids=np.ones(size, np.int32),
        positions=np.broadcast_to(np.arange(plan.seq_len, dtype=np.int32), size),
        loss_weight=np.ones(size, np.float32),
    )
    jax.set_mesh(plan.mesh)
    batch = jax.device_put(batch, batch_sharding(plan.mesh, leading=1))
    state = init_state(plan)
    step = make_step(plan).lower(state, batch).compile()
    memory = step.memory_analysis()
    facts = {
        "adapter_bytes": nbytes(state["trained"]),
        "program_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    }

    def one() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return one, facts


def torch_step(shape: str, count: int) -> tuple[Step, dict]:
    """`count` steps of PEFT, one adapter after the other, each with its share of the rows."""
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
    )  # fmt: skip
    lora = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    tokens = torch.randint(0, m["vocab_size"], (ROWS, m["seq_len"]))

    def one() -> float:
        for rows in tokens.chunk(count):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return one, {}


def work(name: str, shape: str) -> None:
    """A contestant's process: a line in says how many steps, a line out what they took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    library, count = name.split("-")
    make = lmwright_step if library == "lmwright" else torch_step
    step, facts = make(shape, int(count))
    step()
    print(json.dumps(facts), file=out, flush=True)
    for line in sys.stdin:
        for _ in range(REFRESH):
            step()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        result = {
            "wall_s": (time.perf_counter() - wall) / int(line),
            "cpu_s": (time.process_time() - cpu) / int(line),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(result), file=out, flush=True)


def compare(shape: str, names: list[str], rounds: int, steps: int) -> dict[str, dict]:
    """Facts and results over rounds by contestant."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false")
    workers, found = {}, {}
    try:
        for name in names:
            command = [sys.executable, os.path.abspath(__file__), "--worker", name]
            workers[name] = subprocess.Popen(
                [*command, "--shape", shape], env=env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            found[name] = json.loads(workers[name].stdout.readline()) | {"rounds": []}
            print(f"{name}: ready", flush=True)
        for _ in range(rounds):
            for name, worker in workers.items():
                print(steps, file=worker.stdin, flush=True)
                found[name]["rounds"].append(json.loads(worker.stdout.readline()))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return found


def show(found: dict[str, dict]) -> None:
    """Medians, and ratios to a single adapter; ratios are medians over rounds."""
    first = found["lmwright-1"]
    print(f"\n{ROWS} rows a step; load average {', '.join(f'{x:.1f}' for x in os.getloadavg())}")
    head = ("", "wall s", "CPU s", "x wall", "x CPU", "adapters MB", "program MB", "peak MB")
    rows = [head]
    for name, one in found.items():
        pairs = list(zip(one["rounds"], first["rounds"], strict=True))
        ratio = lambda key, pairs=pairs: statistics.median(a[key] / b[key] for a, b in pairs)  # noqa: E731
        rows.append((
            name,
            *(f"{statistics.median(r[k] for r in one['rounds']):.3f}" for k in ("wall_s", "cpu_s")),
            f"{ratio('wall_s'):.2f}", f"{ratio('cpu_s'):.2f}",
            *(f"{one[k] / 1e6:.1f}" if k in one else "" for k in MEMORY),
            f"{one['rounds'][-1]['peak_bytes'] / 1e6:.0f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--torch", action="store_true", help="also N separate PEFT runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.shape)
        return
    names = [f"lmwright-{count}" for count in COUNTS]
    if args.torch:
        names += [f"torch-{count}" for count in COUNTS]
    show(compare(args.shape, names, args.rounds, args.steps))


if __name__ == "__main__":
    main()
