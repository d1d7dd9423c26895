"""What the TPU compiler makes of train steps, as counts that a renaming does not change.

    python -m tests.aot.programs make [--source SRC] [CASE ...]   adds to golden/programs.json
    python -m tests.aot.programs against COMMIT [CASE ...]        compares with another commit

`plan` compiles, one case after the other (minutes and gigabytes each), through the command line
alone, so that the script outlives refactorings.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "programs.json"

# name -> preset, slice, rows of a batch, changes
CASES: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "llama-15m v5e-8 one row each": ("llama-15m", "v5e-8", 8, ()),
    "llama-15m v5e-8": ("llama-15m", "v5e-8", 64, ()),
    "llama-15m v4-32 mesh.tensor=2": ("llama-15m", "v4-32", 64, ("mesh.tensor=2",)),
    "llama-15m v5e:2x2 lora": (
        "llama-15m", "v5e:2x2", 16, ("model.num_layers=2", "lora.base=int4", "lora.rank=8"),
    ),
    "llama-15m v5e:2x2 two loras": (
        "llama-15m", "v5e:2x2", 16,
        ("model.num_layers=2", "lora.base=int8",
         'lora.adapters=[{name = "a", rank = 4}, {name = "b", rank = 6}]'),
    ),
    "moe-6m v5e-8": ("moe-6m", "v5e-8", 64, ()),
    "kisoku-3b v4-32": ("kisoku-3b", "v4-32", 128, ()),
    "llama-1b v5e-8": ("llama-1b", "v5e-8", 32, ("mesh.context=2", "data.pack.seq_len=8192")),
    "llama-8b v5p-128": ("llama-8b", "v5p-128", 64, ("mesh.tensor=4",)),
    "llama-13b v6e-64": (
        "llama-13b", "v6e-64", 64, ("mesh.stage=2", "mesh.tensor=2", "train.num_microbatches=4"),
    ),
    "llama-70b 2xv5e-256": (
        "llama-70b", "2xv5e-256", 1024,
        ("mesh.data=2", "train.num_microbatches=2", "data.pack.seq_len=2048"),
    ),
    "600b v5p-1024": ("600b", "v5p-1024", 512, ("mesh.expert=2", "mesh.tensor=8")),
}  # fmt: skip
SHARED = tuple(CASES)[:4]  # compiled by the ordinary tests, too

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = ", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/")


def instructions(hlo: str) -> Iterator[tuple[str, str]]:
    """(opcode, shape with layout) of every instruction; the parts of a tuple are sorted, since
    their order is that of arguments."""
    for match in _INSTRUCTION.finditer(hlo):
        line = _COMMENT.sub("", hlo[match.end() : hlo.find("\n", match.end())])
        end = _end_of_shape(line)
        shape = line[:end]
        if shape.startswith("("):
            shape = " ".join(sorted(_parts(shape[1:-1])))
        yield line[end:].lstrip().split("(", 1)[0], shape


def _end_of_shape(line: str) -> int:
    if not line.startswith("("):
        return line.index(" ")
    depth = 0
    for place, letter in enumerate(line):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place + 1
    raise ValueError(f"no end of the shape: {line[:80]}")


def _parts(inside: str) -> list[str]:
    """The elements of a tuple's shape; a tuple in it stays in one piece."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(inside):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and not depth:
            parts.append(inside[start:place].strip())
            start = place + 1
    return [*parts, inside[start:].strip()]


def summary(hlo: str, peak_bytes: int, step_s: float | None) -> dict[str, Any]:
    """What is kept of a program: a digest of all (opcode, shape), how many there are of each
    opcode, the peak, and the plan's seconds."""
    counts = Counter(instructions(hlo))
    told = json.dumps(sorted((*key, n) for key, n in counts.items()))
    opcodes: Counter[str] = Counter()
    for (opcode, _), number in counts.items():
        opcodes[opcode] += number
    return {
        "digest": hashlib.sha256(told.encode()).hexdigest()[:32],
        "peak_bytes": peak_bytes,
        "step_s": step_s and float(f"{step_s:.9g}"),
        "opcodes": dict(sorted(opcodes.items())),
    }


def check(name: str, got: dict[str, Any]) -> None:
    """The program is the golden one. Skips the test where the compiler is another one than the
    golden programs'."""
    golden, libtpu = json.loads(GOLDEN.read_text()), importlib.metadata.version("libtpu")
    if golden["libtpu"] != libtpu:
        pytest.skip(f"golden programs are of libtpu {golden['libtpu']}, and {libtpu} is installed")
    old = golden["programs"][name]
    assert old["opcodes"], f"{name}: the golden program is empty"
    assert got == old, f"{name} compiles to another program: {difference(old, got)}"


def check_compiled(name: str, compiled: Any, where: Any) -> None:
    """`check` of what `compile_for` gave for a slice."""
    from lmwright.planner.compiler import cost, hlo

    seconds = cost.estimate(hlo.parse(compiled.hlo), where).step_s
    check(name, summary(compiled.hlo, compiled.peak_bytes, seconds))


def plan_apart(source: Path, name: str) -> dict[str, Any]:
    """The summary of a case, by `lmwright plan` of the package below `source`."""
    import zstandard

    from tests.aot.slices import RUN

    preset, slice_name, batch, changes = CASES[name]
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        run_file = Path(folder, "run.toml")
        run_file.write_text(RUN.format(preset=preset, batch=batch))
        done = subprocess.run(
            [sys.executable, "-m", "lmwright", "plan", str(run_file), "--on", slice_name, "--json",
             *changes],
            env=os.environ | {"PYTHONPATH": str(source), "XDG_CACHE_HOME": folder},
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{name}, {source}:\n{done.stderr[-4000:]}")
        answer = json.loads(done.stdout)
        kept = list(Path(folder, "lmwright", "plans").glob("*/step.hlo.zst"))
        hlo = zstandard.decompress(kept[0].read_bytes()).decode() if kept else ""
        estimate = answer["estimate"] or {}
        return summary(hlo, answer["peak_bytes"], estimate.get("step_s"))


def make(source: Path, names: Sequence[str]) -> None:
    """Writes the cases into the golden file, each when it is done."""
    for name in names:
        got = plan_apart(source, name)
        if not got["opcodes"]:
            raise RuntimeError(f"{name}: does not fit, so there is no program; change its settings")
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"programs": {}}
        libtpu = importlib.metadata.version("libtpu")
        programs = golden["programs"] if golden.get("libtpu") == libtpu else {}
        programs[name] = got
        GOLDEN.write_text(json.dumps({"libtpu": libtpu, "programs": programs}, indent=1) + "\n")
        print(f"{name}: {sum(got['opcodes'].values()):,} instructions", flush=True)


def compare_with(commit: str, names: Sequence[str]) -> bool:
    """Compiles the cases at another commit and here, and prints where they differ."""
    same = True
    with tempfile.TemporaryDirectory(prefix="commit-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            for name in names:
                old, new = plan_apart(tree / "src", name), plan_apart(ROOT / "src", name)
                print(f"{name}: {difference(old, new) or 'the same program'}", flush=True)
                same &= old == new
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return same


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """In what two summaries differ."""
    ways = [f"{key} {old[key]}, now {new[key]}" for key in ("peak_bytes", "step_s")
            if old[key] != new[key]]  # fmt: skip
    a, b = old["opcodes"], new["opcodes"]
    ways += [f"{op} {a.get(op, 0)} times, now {b.get(op, 0)}" for op in sorted(a | b)
             if a.get(op) != b.get(op)]  # fmt: skip
    if old["digest"] != new["digest"] and a == b:
        ways.append("other shapes or layouts")
    return "; ".join(ways)


def main(words: Iterable[str] | None = None) -> int:
    """The script's commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="compile and write the golden file")
    maker.add_argument("--source", type=Path, default=ROOT / "src")
    against = verbs.add_parser("against", help="compare with another commit")
    against.add_argument("commit")
    for verb in (maker, against):
        verb.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args(words)
    if args.verb == "make":
        make(args.source, args.cases)
        return 0
    return 0 if compare_with(args.commit, args.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
