"""Contestants of a benchmark on this CPU: a process for each, rounds interleaved, one at work at a
time, nobody with settings that the others lack.

Wall time is what counts; CPU seconds are printed beside it because they suffer less from other work
on the machine.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# a virtual machine may take an idle process's memory away; the first steps after a pause, in
# which others had their round, pay for getting it back and are not counted
REFRESH = 3

Step = Callable[[], Any]
"""Does one step and returns its loss: a number that was waited for, or, of a step that does not
wait, an array."""


Make = Callable[..., Step]
"""The step of a library, for a shape and the rest of a contestant's name."""


def compete(
    title: str, shapes: dict[str, tuple[int, int]], names: Sequence[str], quick: Sequence[str],
    *, lmwright: Make, torch: Make, shape: str = "all", apart: Sequence[str] = (),
) -> None:  # fmt: skip
    """The command of a benchmark: compares contestants (with `--quick` those of `quick`) for each
    shape, or for `shape` if none is asked for. `shapes` says steps a round and tokens a step. A
    name is `lmwright` or `torch` and what else the function of that library takes, by dashes. Those
    that are `apart` need packages that would change others: they are left out unless `--python`
    names an interpreter that has them."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--shape", choices=[*shapes, "all"], default=shape)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps a round")
    parser.add_argument("--refresh", type=int, default=REFRESH, help="steps a round not counted")
    parser.add_argument(
        "--python", action="append", default=[], help="CONTESTANT=PATH of its interpreter"
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds, fewer contestants")
    parser.add_argument("--only", help="comma-separated contestants: " + ", ".join(names))
    parser.add_argument("--json", help="file for the raw results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        library, *rest = args.worker.split("-")
        make = {"lmwright": lmwright, "torch": torch}[library]
        work(lambda: make(args.shape, *rest))
        return
    pythons = dict(each.split("=", 1) for each in args.python)
    chosen = args.only.split(",") if args.only else [*(quick if args.quick else names)]
    chosen = [name for name in chosen if name in pythons or name not in apart]
    every = {}
    for name in shapes if args.shape == "all" else [args.shape]:
        steps, tokens = shapes[name]
        rounds = 2 if args.quick else args.rounds
        counts = (args.steps or steps, args.refresh)
        every[name] = compare(name, chosen, rounds, counts, pythons)
        show(name, every[name], tokens)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(every, file, indent=1)


def random_rows(
    vocab_size: int, num_rows: int, seq_len: int, documents: int = 1
) -> dict[str, np.ndarray]:
    """Arrays of our batch: rows of random tokens, each cut into as many documents of random
    lengths."""
    size, rng = (num_rows, seq_len), np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, size)
    first = np.zeros(size, bool)
    for row in first:
        row[rng.choice(np.arange(1, seq_len), documents - 1, replace=False)] = True
    places = np.broadcast_to(np.arange(seq_len, dtype=np.int32), size)
    starts = np.maximum.accumulate(np.where(first, places, 0), axis=1)
    return {
        "tokens": tokens.astype(np.int32),
        "segment_ids": 1 + np.cumsum(first, axis=1, dtype=np.int32),
        "positions": (places - starts).astype(np.int32),
        "loss_weight": np.where(first, 0, 1).astype(np.float32),
    }


def lmwright_steps(run: Any, *, wait: bool = True, **rows: Any) -> Step:
    """The train step of a run, compiled and fed as `lmwright train` does; `rows` are arrays of a
    batch [B, T]."""
    import jax

    from lmwright.core.contract import Batch
    from lmwright.core.sharding import batch_sharding
    from lmwright.program.plan import resolve
    from lmwright.program.state import init_state
    from lmwright.program.step import make_step

    plan = resolve(run, jax.devices()[:1])
    jax.set_mesh(plan.mesh)
    batch = Batch(**{name: array[None] for name, array in rows.items()})
    batch = jax.device_put(batch, batch_sharding(plan.mesh, leading=1))
    step, state = make_step(plan), init_state(plan)

    def one() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"]) if wait else metrics["loss"]

    return one


def torch_llama(sizes: dict[str, int], seq_len: int, attention: str = "sdpa") -> Any:
    """The model of our sizes in transformers, random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"], hidden_size=sizes["embed_dim"],
        intermediate_size=sizes["mlp_dim"], num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"], num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"], max_position_embeddings=seq_len, tie_word_embeddings=True,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def torch_steps(
    model: Any, mode: str, precision: str, inputs: dict[str, Any], *, wait: bool = True,
    **optim: Any,
) -> Step:  # fmt: skip
    """The same in torch, on the model's device: fused AdamW on what is trained, clipping at 1.0,
    autocast for bf16, compiled as a whole or eager."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), fused=True, **optim)
    forward = torch.compile(model) if mode == "compile" else model
    device = trained[0].device.type

    def one() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()) if wait else loss.detach()

    return one


def work(make: Callable[[], Step]) -> None:
    """A contestant's process: a line in says how many steps, and how many before them are not
    counted; a line out what they took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    started = time.perf_counter()
    step = make()
    losses = [step(), step()]
    print(json.dumps({"start_s": time.perf_counter() - started}), file=out, flush=True)
    for line in sys.stdin:
        count, refresh = map(int, line.split())
        losses += [step() for _ in range(refresh)]
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [step() for _ in range(count)]
        result = {
            "wall_s": (time.perf_counter() - wall) / count,
            "cpu_s": (time.process_time() - cpu) / count,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "losses": (losses[0], losses[-1]),
        }
        print(json.dumps(result), file=out, flush=True)


def start(name: str, shape: str, python: str) -> subprocess.Popen:
    """A contestant's process, of the script that runs."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false")
    command = [python, os.path.abspath(sys.argv[0]), "--worker", name, "--shape", shape]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def ask(worker: subprocess.Popen, line: str | None = None) -> dict:
    """The worker's next answer. Raises RuntimeError if it died."""
    if line is not None:
        print(line, file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"a contestant ended early: {' '.join(worker.args[-4:])}")
    return json.loads(answer)


def compare(
    shape: str, names: list[str], rounds: int, steps: tuple[int, int], pythons: dict[str, str]
) -> dict:
    """Results by contestant: lists over rounds of as many steps, and as many uncounted ones."""
    workers, results = {}, {}
    try:
        for name in names:
            workers[name] = start(name, shape, pythons.get(name, sys.executable))
            ready = ask(workers[name])
            results[name] = {"start_s": ready["start_s"], "rounds": []}
            print(f"{shape} {name}: ready after {ready['start_s']:.0f} s", flush=True)
        for _ in range(rounds):
            for name in names:
                results[name]["rounds"].append(ask(workers[name], f"{steps[0]} {steps[1]}"))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def show(shape: str, results: dict, tokens: int) -> None:
    """Medians, spread, and ratios to torch's best, for steps of `tokens`."""
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
