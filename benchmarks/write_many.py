"""CPU seconds of many answers: slots beside batches, and beside transformers.

    python benchmarks/write_many.py FOLDER questions.jsonl --column question --limit 96

FOLDER is a Hugging Face folder with a chat template, which all read in float32. Each row's question
is a user's message; answers are greedy and have the lengths that the model gives them. Batches are
of 32 questions of nearly the same length. Loading is not counted, compilation is. Needs torch and
transformers.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

BATCH = 32


def main() -> None:
    """Measures all, one after the other in this process, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("file", type=Path, help="a .jsonl file")
    parser.add_argument("--column", default="prompt")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    lines = args.file.read_text().splitlines()[: args.limit]
    prompts = [json.loads(line)[args.column] for line in lines]
    found = {}
    for name, run in (
        ("transformers, batches", by_transformers),
        ("lmwright, batches", lambda *given: by_lmwright(*given, BATCH)),
        ("lmwright, slots", lambda *given: by_lmwright(*given, len(prompts))),
    ):
        wall, cpu, ids = run(args.folder, prompts, args.max_new_tokens)
        found[name] = cpu, ids
        lengths = sorted(map(len, ids))
        print(
            f"{name:22} {cpu:7.1f} CPU s {wall:7.1f} s, {sum(lengths):,} tokens, answers of "
            f"{lengths[0]} to {lengths[-1]}",
            flush=True,
        )
    seconds, theirs = found.pop("transformers, batches")
    for name, (cpu, ids) in found.items():
        same = sum(a == b for a, b in zip(ids, theirs, strict=True))
        print(f"{name}: {seconds / cpu:.2f}x, {same} of {len(ids)} answers are theirs")


Found = tuple[float, float, list[list[int]]]
"""Wall and CPU seconds, and the ids of each answer."""


def by_lmwright(folder: str, prompts: list[str], most: int, at_a_time: int) -> Found:
    """Answers, so many prompts given at a time."""
    from lmwright.evals.prompted import ask, kept_weights
    from lmwright.evals.sampling import Sampling
    from lmwright.formats.load import load_model

    loaded = load_model(folder)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    if at_a_time == len(prompts):
        order = list(range(len(prompts)))  # slots take them as they come
    ids: list[Any] = [None] * len(prompts)
    asked = ask(loaded, prompts, Sampling(most), precision="fp32", chat=True)
    w = kept_weights(loaded, asked.compute)
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(order), at_a_time):
        some = order[start : start + at_a_time]
        asked = ask(loaded, [prompts[i] for i in some], Sampling(most), precision="fp32", chat=True)
        for i, text in zip(some, asked.texts(w), strict=True):
            ids[i] = list(text.tokens)
    return time.perf_counter() - wall, time.process_time() - cpu, ids


def by_transformers(folder: str, prompts: list[str], most: int) -> Found:
    """Answers of batches that are padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    ids: list[Any] = [None] * len(prompts)
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        told = [[{"role": "user", "content": prompts[i]}] for i in some]
        inputs = tokenizer.apply_chat_template(
            told, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        for i, row in zip(some, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ids[i] = row[: row.index(end)] if end in row else row
    return time.perf_counter() - wall, time.process_time() - cpu, ids


if __name__ == "__main__":
    main()
