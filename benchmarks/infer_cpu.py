"""Inference beside transformers on this CPU: `eval --text` and greedy decoding, tokens a second.

    python benchmarks/infer_cpu.py                     # a random model of 135M parameters
    python benchmarks/infer_cpu.py --model FOLDER      # any Hugging Face folder of the llama family
    python benchmarks/infer_cpu.py --threads 1         # where others work on the machine, too
    python benchmarks/infer_cpu.py --compile           # also torch.compile with a static cache

The same weights, tokens and prompt for all. Each contestant lives in its own process with the same
cores; rounds are interleaved and one works at a time. Compilation is not counted but said. Ratios
are to the best of transformers, by wall time and by CPU seconds, which suffer less from other work.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

OURS = ("lmwright",)
THEIRS = ("transformers-fp32", "transformers-bf16")
COMPILED = ("transformers-fp32-compile",)
PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 16, 64, 1024
LONG_TEXT = 512  # tokens that decoding is compiled for
TASKS = ("eval", "decode", "start")

Task = Callable[[], Any]


def random_model(folder: str) -> None:
    """A model of SmolLM2-135M's sizes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=True, rope_theta=100_000.0, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def tokens(count: int, vocab_size: int) -> list[int]:
    """The ids that every contestant reads."""
    import random

    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(count)]


def lmwright_tasks(folder: str) -> dict[str, Task]:
    """What the commands `eval --text` and `generate` run, after their files are read."""
    import tokenizers

    from lmwright.data.tokens.tokenizer import TextTokenizer
    from lmwright.evals.compute import compute_text, decode_compute, row_compute
    from lmwright.evals.generate import Sampling, generate
    from lmwright.evals.text import evaluate_text
    from lmwright.formats.load import load_model

    loaded = load_model(folder)
    model, w = loaded.model, loaded.weights
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    plain = TextTokenizer(tokenizers.Tokenizer(words))
    text = tokens(CONTEXT + 1, model.vocab_size)
    prompt = tokens(PROMPT_TOKENS, model.vocab_size)
    eval_compute, compute = row_compute(), decode_compute(model, w, LONG_TEXT)
    print(f"eval: {compute_text(eval_compute)}; decode: {compute_text(compute)}", file=sys.stderr)

    def decode(count: int) -> list[int]:
        settings = Sampling(max_new_tokens=count)
        return list(generate(model, w, plain, [prompt], settings, compute)[0].tokens)

    return {
        "eval": lambda: evaluate_text(model, w, text, context=CONTEXT, compute=eval_compute).loss,
        "decode": lambda: decode(PROMPT_TOKENS + NEW_TOKENS),
        "start": lambda: decode(PROMPT_TOKENS),
    }


def transformers_tasks(folder: str, precision: str, compiled: bool) -> dict[str, Task]:
    """The same, with a dynamic cache or, compiled, a static one."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    size = model.config.vocab_size
    text = torch.tensor([tokens(CONTEXT + 1, size)])
    prompt = torch.tensor([tokens(PROMPT_TOKENS, size)])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"

    @torch.inference_mode()
    def loss() -> float:
        return float(model(input_ids=text, labels=text, use_cache=False).loss)

    @torch.inference_mode()
    def decode(count: int) -> list[int]:
        out = model.generate(prompt, max_new_tokens=count, **options)
        return out[0, PROMPT_TOKENS:].tolist()

    return {
        "eval": loss,
        "decode": lambda: decode(PROMPT_TOKENS + NEW_TOKENS),
        "start": lambda: decode(PROMPT_TOKENS),
    }


def work(name: str, folder: str) -> None:
    """A contestant's process: a line in names a task, a line out says what it took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    library, *rest = name.split("-")
    if library == "lmwright":
        tasks = lmwright_tasks(folder)
    else:
        tasks = transformers_tasks(folder, rest[0], "compile" in rest)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        found = tasks[line.strip()]()
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(took | {"found": found}), file=out, flush=True)


def start(name: str, folder: str, threads: int) -> subprocess.Popen:
    """A contestant on the first `threads` cores of this process."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = dict(os.environ, JAX_PLATFORMS="cpu", OMP_NUM_THREADS=str(threads))
    command = [sys.executable, os.path.abspath(__file__), "--worker", name, "--model", folder]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip


def ask(worker: subprocess.Popen, task: str) -> dict:
    """What a task took. Raises RuntimeError if the worker died."""
    print(task, file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"a contestant ended early: {' '.join(worker.args[-3:])}")
    return json.loads(answer)


def compare(folder: str, names: list[str], rounds: int, threads: int) -> dict:
    """By contestant and task: what each round took. The first of all is compilation."""
    workers = {name: start(name, folder, threads) for name in names}
    took = {name: {task: [] for task in TASKS} for name in names}
    try:
        for _ in range(1 + rounds):
            for task in TASKS:
                for name in names:
                    took[name][task].append(ask(workers[name], task))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return took


def per_token(took: dict, clock: str) -> dict[str, float]:
    """Seconds a token of whole rows, and of decoding: a long text less a short one."""
    best = {task: min(r[clock] for r in rounds[1:]) for task, rounds in took.items()}
    return {
        "eval": best["eval"] / CONTEXT,
        "decode": (best["decode"] - best["start"]) / NEW_TOKENS,
    }


def show(took: dict) -> None:
    """Best rounds, the ratios, and whether the results agree."""
    theirs = [name for name in took if name not in OURS]
    for clock in ("wall_s", "cpu_s"):
        speed = {name: per_token(each, clock) for name, each in took.items()}
        for kind in ("eval", "decode"):
            best = min(speed[name][kind] for name in theirs)
            for name in took:
                rate, ratio = 1 / speed[name][kind], best / speed[name][kind]
                unit = "s" if clock == "wall_s" else "CPU-s"
                print(f"{kind:6} {name:26} {rate:8.1f} tokens/{unit:5}  {ratio:5.2f} x")
    for name, each in took.items():
        first = sum(rounds[0]["wall_s"] - rounds[1]["wall_s"] for rounds in each.values())
        print(
            f"{name}: first calls took {first:.0f} s longer; loss {each['eval'][-1]['found']:.4f}"
        )
    texts = [took[name]["decode"][-1]["found"] for name in (*OURS, "transformers-fp32")]
    print(f"greedy text equal to transformers-fp32: {texts[0] == texts[1]}")
    print("load average:", ", ".join(f"{x:.1f}" for x in os.getloadavg()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", help="contestants of transformers, with commas")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.model)
    others = options.only.split(",") if options.only else [*THEIRS, *COMPILED * options.compile]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or folder
        if not options.model:
            random_model(folder)
        show(compare(model, [*OURS, *others], options.rounds, options.threads))


if __name__ == "__main__":
    main()
