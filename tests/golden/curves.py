"""Curves of 20 steps, made through the command line alone, so that they outlive refactorings.

    python -m tests.golden.curves make FILE [CASE ...]        writes those of the working tree
    python -m tests.golden.curves against COMMIT [CASE ...]   compares bit for bit with a commit

Every case is trained in one process of one CPU device, with XLA's flags of the tests.
"""

import argparse
import importlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.golden.cases import CASES, MODELS

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = ("lmwright.cli.main", "lmwright.cli")  # the second is that of older commits
KINDS = ("train", "eval")  # lines of metrics.jsonl that tell of learning
UNSTEADY = ("_s", "_per_step", "_bytes", "_gib", "time", "mfu", "wait_share", "per_s")  # measured
DERIVED = ("ppl", "bits_per_byte", "rows", "tokens_seen")

Curve = dict[str, list[float]]
"""Values by step for each metric, as `train.loss` or `eval.loss`."""

SUBJECTS = ["the red cat", "a small bird", "the old sailor", "my neighbor", "the tall tree"]
VERBS = ["looks at", "sings of", "remembers", "forgets", "counts", "waits for"]
OBJECTS = ["the sea", "nine stones", "a long road", "the morning", "some bread", "its shadow"]


def sentence(dice: random.Random) -> str:
    """A sentence by dice."""
    return " ".join(dice.choice(words) for words in (SUBJECTS, VERBS, OBJECTS))


def write_sources(folder: Path) -> None:
    """Text and examples of each kind, always the same."""
    dice = random.Random(7)
    rows: dict[str, list[dict]] = {"text": [], "sft": [], "pairs": [], "rated": []}
    for number in range(160):
        ask, good, bad = f"What {sentence(dice)}?", sentence(dice), sentence(dice) + "."
        rows["text"].append({"text": ". ".join(sentence(dice) for _ in range(1 + number % 9))})
        rows["sft"].append({"prompt": ask, "completion": good})
        rows["pairs"].append({"prompt": ask, "chosen": good, "rejected": bad})
        rows["rated"].append({"prompt": ask, "completion": good, "label": number % 3 > 0})
    rows["masked"] = rows["text"]
    labels = ("short", "middle", "long")
    rows["labeled"] = [row | {"label": labels[i % 9 // 3]} for i, row in enumerate(rows["text"])]
    rows["several"] = [row | {"label": [labels[k] for k in range(3) if i % 9 // 3 >= k]}
                       for i, row in enumerate(rows["text"], 2)]  # fmt: skip
    rows["scored"] = [{"text": row["prompt"], "text_pair": row["chosen"], "label": i % 5 / 4}
                      for i, row in enumerate(rows["pairs"])]  # fmt: skip
    rows["numbered"] = [row | {"label": i % 9 / 4} for i, row in enumerate(rows["text"])]
    triples = {"anchor": "prompt", "positive": "chosen", "negative": "rejected"}
    rows["related"] = [{k: row[of] for k, of in triples.items()} for row in rows["pairs"]]
    rows["tagged"] = [{"tokens": words, "tags": tags_of(words)} for words in
                      (row["text"].split() for row in rows["text"])]  # fmt: skip
    rows["answered"] = [
        {"question": f"What {row['text'].split()[-1]}?", "context": row["text"], "answers": [
            {"text": word, "answer_start": row["text"].index(word)}
            for word in row["text"].split()[2:3] if number % 4]}
        for number, row in enumerate(rows["text"])
    ]  # fmt: skip
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def tags_of(words: Sequence[str]) -> list[str]:
    """Tags of words of at least five letters, which begin anew after a shorter one."""
    long = [len(word) >= 5 for word in words]
    begins = [not before for before in (False, *long[:-1])]
    return ["O" if not is_long else "B-LONG" if first else "I-LONG"
            for is_long, first in zip(long, begins, strict=True)]  # fmt: skip


ROWS = {"text": "text", "masked": "text", "sft": "prompt", "pairs": "preference", "rated": "rated",
        "labeled": "labeled", "several": "labeled", "scored": "labeled", "numbered": "labeled",
        "related": "related", "tagged": "tagged", "answered": "answered"}  # fmt: skip
PLAIN = ("labeled", "several", "scored", "numbered", "related", "tagged", "answered")
"""Whose objective alone learns from them; no chats."""


def run_of(folder: Path, name: str) -> Path:
    """The run directory of a case."""
    return folder / "runs" / name.replace(" ", "-")


def run_file(folder: Path, name: str, case: dict) -> Path:
    """Writes the run file of a case; JSON's scalars, lists and strings are TOML's as well."""
    data = case.get("data", "text")
    optim = {"kind": "adamw", "learning_rate": 2e-3, "schedule": {"kind": "cosine",
             "warmup_steps": 4}}  # fmt: skip
    tokenizer = {"vocab_size": 384} if ROWS[data] == "text" else {
        "path": str(folder / "data-text" / "tokenizer")}  # fmt: skip
    if data == "masked":
        tokenizer["special_tokens"] = ["<|endoftext|>", "<|mask|>"]
    sections = {
        "name": "curve", "dir": str(run_of(folder, name)), "seed": 5,
        "model": case.get("model", {"kind": "llama", **MODELS["llama"]}),
        "objective": dict(case.get("objective", {"kind": "clm", "z_loss": 1e-4})),
        "optim": optim | case.get("optim", {}),
        "data": {
            "dir": str(folder / f"data-{data}"), "workers": 1, "holdout_fraction": 0.1,
            "sources": [{"path": str(folder / f"{data}.jsonl"), "rows": ROWS[data]}],
            "tokenizer": tokenizer,
            **({} if data in PLAIN or ROWS[data] == "text" else {"chat": {"template": "none"}}),
            "pack": {"method": "best-fit", "seq_len": 96},
        },
        "train": {"steps": 20, "global_batch_size": 6, "precision": "fp32"}
        | case.get("train", {}),
        "checkpoint": {"save_every_steps": 1000},
        "metrics": {"log_every_steps": 1, "trackers": []},
    }  # fmt: skip
    if "teacher" in case:
        sections["objective"]["teacher"] = str(run_of(folder, case["teacher"]))
    if "lora" in case:
        sections["lora"] = {"kind": "lora", **case["lora"]}
    path = folder / f"{name.replace(' ', '-')}.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in sections.items()))
    return path


def toml(value: object) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def read_curve(path: Path) -> Curve:
    """What metrics.jsonl says of learning: everything but times and memory."""
    curve: Curve = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        place = ".".join(filter(None, (row.pop("kind"), row.pop("source", None))))
        for name, value in row.items():
            learned = place.startswith(KINDS) and not name.endswith(UNSTEADY)
            if learned and isinstance(value, int | float) and name != "step":
                curve.setdefault(f"{place}.{name}", []).append(value)
    return curve


def train_here(folder: Path, names: Sequence[str], changes: Sequence[str] = ()) -> dict[str, Curve]:
    """Trains the cases, with fields of their run files changed, with the lmwright that this process
    imports."""
    for module in ENTRIES:
        try:
            main = importlib.import_module(module).main
            break
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise
    write_sources(folder)
    prepared: set[str] = set()
    curves = {}
    for name in names:
        case, data = CASES[name], CASES[name].get("data", "text")
        for kind in ("text", data):  # the tokenizer is that of the text
            if kind not in prepared:
                own = kind in (*PLAIN, "pairs", "rated") or (changes and kind == data)
                made = case if own else {"data": kind}
                ran(main, "prepare", str(run_file(folder, f"prepare-{kind}", made)), *changes)
                prepared.add(kind)
        teacher = case.get("teacher")
        if teacher and not run_of(folder, teacher).exists():
            ran(main, "train", str(run_file(folder, teacher, CASES[teacher])), *changes)
        path = run_file(folder, name, case)
        ran(main, "train", str(path), *changes)
        curves[name] = read_curve(run_of(folder, name) / "metrics.jsonl")
    return curves


def ran(main, *words: str) -> None:
    """Runs a command; its failure ends this process."""
    if code := main(words):
        sys.exit(f"lmwright {' '.join(words)}: exit code {code}")


def train_apart(
    source: Path, names: Sequence[str], changes: Sequence[str] = (), **variables: str
) -> dict[str, Curve]:
    """Trains the cases in a process of its own with the package that lies below `source`, with
    fields changed and environment variables set."""
    from tests.quick_compile import FLAGS

    with tempfile.TemporaryDirectory(prefix="curves-") as folder:
        out = Path(folder, "curves.json")
        environment = os.environ | {
            "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS,
            "LMWRIGHT_SOURCE": str(source), **variables,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.golden.curves", "here", folder, str(out), *names]
        command += [word for change in changes for word in ("--set", change)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def differences(old: dict[str, Curve], new: dict[str, Curve], rel: float = 0.0) -> list[str]:
    """A line for each old metric of each case of `new` that is not within `rel`, with the first
    value that is not. A rounding may turn single words of an accuracy: its `rel` is wider."""
    lines = []
    for case, curve in new.items():
        for metric, before in old[case].items():
            now, near = curve.get(metric, []), rel * (1000 if "accuracy" in metric else 1)
            if len(before) != len(now):
                lines.append(f"{case}: {metric} has {len(now)} values, {len(before)} before")
                continue
            for number, (a, b) in enumerate(zip(before, now, strict=True), 1):
                if a != b and not math.isclose(a, b, rel_tol=near, abs_tol=near):
                    lines.append(f"{case}: {metric}, value {number}: {a!r}, now {b!r}")
                    break
    return lines


def compare_with(commit: str, names: Sequence[str]) -> list[str]:
    """Trains the cases at another commit and here, and says where a bit differs."""
    with tempfile.TemporaryDirectory(prefix="commit-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--detach", str(tree), commit], check=True, capture_output=True
        )
        try:
            old = train_apart(tree / "src", names)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return differences(old, train_apart(ROOT / "src", names))


def write(path: Path, curves: dict[str, Curve]) -> None:
    """One line a metric, with enough digits for a tolerance of 1e-5; what follows from others is
    left out."""
    short = {
        case: {
            metric: [float(f"{v:.7g}") for v in values]
            for metric, values in curve.items()
            if not metric.endswith(DERIVED)
        }
        for case, curve in curves.items()
    }
    text = ",\n".join(
        f' "{case}": {{\n'
        + ",\n".join(f'  "{metric}": {json.dumps(values)}' for metric, values in curve.items())
        + "\n }"
        for case, curve in short.items()
    )
    path.write_text("{\n" + text + "\n}\n")


def main(words: Iterable[str] | None = None) -> int:
    """The script's commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    here = verbs.add_parser("here")
    here.add_argument("folder", type=Path)
    here.add_argument("out", type=Path)
    here.add_argument("--set", action="append", default=[])
    make = verbs.add_parser("make", help="write the curves of the working tree, or of --source")
    make.add_argument("out", type=Path)
    make.add_argument("--source", type=Path, default=ROOT / "src")
    against = verbs.add_parser("against", help="compare bit for bit with another commit")
    against.add_argument("commit")
    for verb in (here, make, against):
        verb.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args(words)
    if args.verb == "here":
        curves = train_here(args.folder, args.cases, args.set)
        used = Path(sys.modules["lmwright"].__file__).resolve()
        if not used.is_relative_to(Path(os.environ["LMWRIGHT_SOURCE"]).resolve()):
            sys.exit(f"{used} was imported, not {os.environ['LMWRIGHT_SOURCE']}")
        args.out.write_text(json.dumps(curves))
    elif args.verb == "make":
        write(args.out, train_apart(args.source, args.cases))
    else:
        lines = compare_with(args.commit, args.cases)
        print("\n".join(lines) or f"{len(args.cases)} curves are equal bit for bit")
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
