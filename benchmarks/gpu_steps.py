"""Contestants of `train_gpu.py`, each in its own process: what a step of theirs is.

A contestant is a library and how it is used, as in torch-compile. Products are bf16 and trained
weights fp32 on both sides, frozen weights and those that generate bf16. Weights are random, and so
are tokens.
"""

import fcntl
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from contestants import REFRESH, Step, lmwright_steps, random_rows, torch_llama, torch_steps
from gpu_rows import ALPHA, PROMPT_TOKENS, RANK, ROWS, WAITS, Row

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "triton", "transformers",
    "peft", "liger-kernel", "unsloth",
)  # fmt: skip
MANY_TOKENS = 100_000
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Ready:
    """A contestant that can work."""

    step: Step
    peak_bytes: Callable[[], int]
    """Most memory of the card that was in use."""
    facts: dict[str, Any] = field(default_factory=dict)
    chosen: Callable[[], dict[str, Any]] = dict
    """Facts that are known once a step was compiled."""


def ours_of(row: Row, packed: bool, changes: Sequence[str]) -> Any:
    """Our run of a row, whose rows may hold several documents if `packed`."""
    from plan_gpu import RUN

    from lmwright.formats.open import load_run

    said = [f"model.{name}={size}" for name, size in row.sizes.items()]
    said += [f"model.seq_len={row.seq_len}", f"train.global_batch_size={row.rows}"]
    said += ["train.remat=auto"]  # as where nobody says it
    if not packed:  # as transformers reads a row without a mask
        said += ["data.pack.attention=row"]
    if row.lora:
        said += [f"lora.rank={RANK}", f"lora.alpha={ALPHA}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(RUN)
        return load_run(path, [*said, *changes])


def by_lmwright(row: Row, device: str, mode: str = "", changes: Sequence[str] = ()) -> Ready:
    """Our step: rows of one document each, or `packed`; or our generation."""
    import jax

    from lmwright.core.param import count_params
    from lmwright.kernels.select import KERNELS
    from lmwright.planner.analytic.remat import settled_here
    from lmwright.program.plan import resolve
    from lmwright.program.state import abstract_state
    from lmwright.train.throughput import memory_bytes, peak_flops

    run, devices = ours_of(row, mode == "packed", changes), jax.devices()[:1]
    peak = lambda: memory_bytes(devices)  # noqa: E731
    if row.generates:
        facts = {"num_params": count_params(run.model.spec())}
        return Ready(_lmwright_texts(row, run.model), peak, facts)
    if devices[0].platform == "gpu":
        run = settled_here(run, devices).run  # the remat that `train` would choose
    plan = resolve(run, devices)
    parts = abstract_state(plan)["trained"].values()
    trained = [leaf for part in parts for leaf in jax.tree.leaves(part["weights"])]
    facts: dict[str, Any] = {"trained_params": sum(leaf.size for leaf in trained)}
    facts |= {"remat": plan.run.train.remat}
    documents = row.documents if mode == "packed" else 1
    if documents == 1 and (most := peak_flops(devices)):
        facts |= {"flops": plan.flops_per_step / most}  # seconds of the card at its peak
    rows = random_rows(row.sizes["vocab_size"], row.rows, row.seq_len, documents)
    attention = lambda: {"attention": KERNELS["gpu attention taken"]()}  # noqa: E731
    return Ready(lmwright_steps(run, wait=False, **rows), peak, facts, attention)


def _lmwright_texts(row: Row, model: Any) -> Step:
    """Texts by what `lmwright generate` calls, with weights that come from the host as its files
    do: in its precision, and each layer by itself."""
    import jax.numpy as jnp
    import numpy as np
    import tokenizers

    from lmwright.core.param import Param, map_params
    from lmwright.data.tokens.tokenizer import TextTokenizer
    from lmwright.evals.compute import decode_compute
    from lmwright.evals.generate import Sampling, generate
    from lmwright.models.cached import layers_apart

    rng = np.random.default_rng(0)

    def made(p: Param) -> Any:
        host = rng.standard_normal(p.shape, np.float32) / 50 if p.fill is None else p.fill
        return jnp.asarray(np.broadcast_to(host, p.shape).astype(jnp.bfloat16))

    w = map_params(made, model.spec())
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    plain = TextTokenizer(tokenizers.Tokenizer(words))
    prompts = random_rows(model.vocab_size, row.rows, PROMPT_TOKENS)["tokens"].tolist()
    settings = Sampling(max_new_tokens=row.seq_len - PROMPT_TOKENS)
    compute = decode_compute(model, w, MANY_TOKENS)  # as it is chosen for many prompts
    w = layers_apart(model, w, free=True) if compute.unroll else w

    def one() -> int:
        texts = generate(model, w, plain, prompts, settings, compute)
        return sum(len(text.tokens) for text in texts)

    return one


def by_torch(row: Row, device: str, mode: str) -> Ready:
    """Full training in transformers: `eager`, `compile`, or compiled on packed rows, which a
    `mask` of all scores or the blocks of `flex` attention keep apart."""
    attention = "flex_attention" if mode == "flex" else "sdpa"
    model = torch_llama(row.sizes, row.seq_len, attention).to(device)
    packed = mode in ("mask", "flex")
    inputs = _inputs(row, device, row.documents if packed else 1)
    if packed:
        inputs |= {"attention_mask": _apart(inputs["position_ids"], mode)}
    return _trains(model, "eager" if mode == "eager" else "compile", inputs, device)


def by_liger(row: Row, device: str, mode: str) -> Ready:
    """The same with Liger's kernels and its fused loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return by_torch(row, device, mode)


def by_peft(row: Row, device: str, mode: str) -> Ready:
    """LoRA by PEFT: frozen weights in bf16, factors in float32."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch_llama(row.sizes, row.seq_len).to(device, torch.bfloat16)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return _trains(get_peft_model(model, config), mode, _inputs(row, device), device)


def by_unsloth(row: Row, device: str, mode: str) -> Ready:
    """LoRA by Unsloth, from a folder with random weights."""
    from unsloth import FastLanguageModel  # before transformers, as it patches that

    # isort: split
    import tokenizers
    import torch
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        torch_llama(row.sizes, row.seq_len).to(torch.bfloat16).save_pretrained(folder)
        words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=row.seq_len, dtype=torch.bfloat16, load_in_4bit=False
        )
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=ALPHA, lora_dropout=0, bias="none",
        target_modules=list(MATRICES), use_gradient_checkpointing=False,
    )  # fmt: skip
    return _trains(model, mode, _inputs(row, device), device)


def by_transformers(row: Row, device: str, mode: str) -> Ready:
    """Greedy texts of transformers with a static cache, whose step it compiles on a card."""
    import torch

    model = torch_llama(row.sizes, row.seq_len).to(device, torch.bfloat16).eval()
    model.config.use_cache = True
    tokens = random_rows(row.sizes["vocab_size"], row.rows, PROMPT_TOKENS)["tokens"]
    prompt = torch.tensor(tokens, dtype=torch.long, device=device)
    options = dict(
        attention_mask=torch.ones_like(prompt), max_new_tokens=row.seq_len - PROMPT_TOKENS,
        do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation=mode,
    )  # fmt: skip

    @torch.inference_mode()
    def one() -> int:
        out = model.generate(prompt, **options).cpu()
        return out[:, PROMPT_TOKENS:].numel()

    return Ready(one, _torch_peak(device), {"num_params": _count(model.parameters())})


def _inputs(row: Row, device: str, documents: int = 1) -> dict[str, Any]:
    """The batch that ours reads, for transformers."""
    import torch

    rows = random_rows(row.sizes["vocab_size"], row.rows, row.seq_len, documents)
    tokens = torch.tensor(rows["tokens"], dtype=torch.long, device=device)
    if documents == 1:
        return {"input_ids": tokens, "labels": tokens}
    places = torch.tensor(rows["positions"], dtype=torch.long, device=device)
    labels = tokens.masked_fill(places == 0, -100)
    return {"input_ids": tokens, "labels": labels, "position_ids": places}


def _apart(places: Any, mode: str) -> Any:
    """Scores of packed rows that count, from their positions [B, T]: bool [B, 1, T, T], or the
    blocks of flex attention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    document = (places == 0).cumsum(1)
    rows, seq_len = document.shape
    if mode == "flex":

        def counts(b: Any, h: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (document[b, query] == document[b, key])

        return create_block_mask(counts, rows, None, seq_len, seq_len, device=places.device)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones(seq_len, seq_len, dtype=torch.bool, device=places.device).tril()


def _trains(model: Any, mode: str, inputs: dict[str, Any], device: str) -> Ready:
    import torch

    torch.set_float32_matmul_precision("high")  # TF32 where a product is not bf16, as XLA has it
    facts = {"trained_params": _count(p for p in model.parameters() if p.requires_grad)}
    step = torch_steps(model, mode, "bf16", inputs, wait=False, lr=1e-4, weight_decay=0.1)
    return Ready(step, _torch_peak(device), facts)


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _torch_peak(device: str) -> Callable[[], int]:
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


LIBRARIES = {
    "lmwright": by_lmwright, "torch": by_torch, "liger": by_liger, "peft": by_peft,
    "unsloth": by_unsloth, "transformers": by_transformers,
}  # fmt: skip


def traced(ready: Ready, folder: Path) -> None:
    """Leaves a trace of three steps of ours in a folder, for xprof and `jax.profiler`."""
    import jax

    with jax.profiler.trace(folder):
        for _ in range(3):
            last = ready.step()
        float(last)  # waits


class Turns:
    """A lock that contestants share while they get ready; each is timed when it has it alone."""

    def __init__(self, path: Path | None):
        self._file = path.open("a") if path else None
        self._take(fcntl.LOCK_SH)

    def _take(self, how: int) -> None:
        if self._file:
            fcntl.flock(self._file, how)

    def wait(self) -> None:
        """Waits until all others are ready or done, and says so by a file meanwhile."""
        if self._file:
            self._take(fcntl.LOCK_UN)
            Path(WAITS).touch()
            self._take(fcntl.LOCK_EX)
            Path(WAITS).unlink()


def measure(
    ready: Ready, tokens: int, steps: int, rounds: int, began: float, turns: Turns
) -> dict[str, Any]:
    """Speed, memory and facts of a contestant whose process began then."""
    losses = [float(ready.step()), float(ready.step())]
    ready_s = time.perf_counter() - began
    turns.wait()
    for _ in range(min(REFRESH, steps)):
        losses.append(float(ready.step()))
    speeds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            last = ready.step()
        losses.append(float(last))  # waits
        speeds.append(steps * tokens / (time.perf_counter() - start))
    facts, median = ready.facts | ready.chosen(), statistics.median(speeds)
    if flops := facts.pop("flops", None):
        facts["mfu"] = flops * median / tokens
    return facts | {
        "tokens_per_s": speeds, "ready_s": ready_s, "peak_bytes": ready.peak_bytes(),
        "losses": [losses[0], losses[-1]],
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def work(
    name: str, contestant: str, device: str, tiny: bool, changes: Sequence[str],
    traces: Path | None, turn: Path | None, began: float,
) -> None:  # fmt: skip
    """A contestant's process: prints its record as one line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; our pipe stays clean
    row = ROWS[name].tiny() if tiny else ROWS[name]
    library, *mode = contestant.split("-")
    more = {"changes": changes} if library == "lmwright" else {}
    steps, rounds = (2, 2) if tiny else (1 if row.generates else 10, 3)
    try:
        where = {"gpu": "cuda"}.get(device, device)
        turns = Turns(turn)
        ready = LIBRARIES[library](row, where, *mode, **more)
        record = measure(ready, row.tokens, steps, rounds, began, turns)
        if traces and library == "lmwright":
            traced(ready, traces / name)
    except Exception as error:
        lines = str(error).strip().splitlines()
        record = {"error": ": ".join([type(error).__name__, *lines[:1]])}
        print(error, file=sys.stderr)
    print(json.dumps(record | {"versions": versions()}), file=out, flush=True)
