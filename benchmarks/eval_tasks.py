"""CPU seconds of `lmwright eval --tasks` beside lm-evaluation-harness with transformers.

    python benchmarks/eval_tasks.py FOLDER --tasks mmlu_abstract_algebra --data DATA --shots 5

FOLDER is a Hugging Face folder, which both read in float32. Needs torch, transformers and the
harness. Loading is not counted, compilation is. Both get the same questions; the largest difference
of their log-likelihoods is printed, too.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import lmwright.evals.tasks as ours
from lmwright.formats.load import load_model


def main() -> None:
    """Measures both, one after the other in this process, and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--tasks", required=True, help="names or files, with commas between")
    parser.add_argument("--data", type=Path, help="folder with the data of named tasks")
    parser.add_argument("--shots", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument(
        "--batch", type=int, default=16, help="rows that transformers reads at once"
    )
    args = parser.parse_args()
    their_seconds, theirs = by_transformers(args)
    loaded = load_model(args.folder)
    _ = loaded.weights
    started = time.process_time()
    found = ours.task_scores(
        loaded, args.tasks.split(","), shots=args.shots, limit=args.limit, data=args.data,
        precision="fp32",
    )  # fmt: skip
    our_seconds = time.process_time() - started
    print(f"harness with transformers {their_seconds:8.1f} CPU s")
    print(f"lmwright                  {our_seconds:8.1f} CPU s, {their_seconds / our_seconds:.2f}x")
    for task, samples in theirs["samples"].items():
        worst = max(
            abs(a[0][0] - b[0][0])
            for one, other in zip(samples, found.details["samples"][task], strict=True)
            for a, b in zip(one["resps"], other["resps"], strict=True)
        )
        print(f"{task}: {len(samples)} questions, log-likelihoods differ by {worst:.1e} at most")


def by_transformers(args: argparse.Namespace) -> tuple[float, dict]:
    """CPU seconds of the harness's own model class, and what it found."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from lmwright.evals.local_data import local_data

    data = local_data(args.data) if args.data else nullcontext()
    with ours._silent(), patch.multiple(evaluator, create=True, **ours.UNASKED), data:
        model = HFLM(pretrained=args.folder, dtype="float32", device="cpu", batch_size=args.batch)
        started = time.process_time()
        tasks, manager = ours._wanted(args.tasks.split(","))
        found = evaluator.simple_evaluate(
            model=model, tasks=tasks, num_fewshot=args.shots, limit=args.limit,
            task_manager=manager, bootstrap_iters=ours.BOOTSTRAPS,
        )  # fmt: skip
        return time.process_time() - started, found


if __name__ == "__main__":
    main()
