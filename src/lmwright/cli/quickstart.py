"""The whole way once, on text that every Python has: its standard library.

sources, docstrings --> tokenizer --> store --> train --> eval --> sample --> HF folder
"""

import ast
import json
import shlex
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash
from rich.console import Console

from lmwright.config.text import literal
from lmwright.errors import UserError
from lmwright.guard.files import remove_leftovers, write_whole
from lmwright.guard.temporary import write_output

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_IN = 20  # one module in so many is kept for evaluation
PROMPTS = ("def read_file(path):\n", "class Queue:\n", "Return the number of")


def main(folder: str = "quickstart") -> int:
    """Runs every step that is not done yet; returns the exit code."""
    from lmwright.data.prepare import prepare_command
    from lmwright.formats.open import load_run
    from lmwright.train.command import train_command

    console = Console(highlight=False)
    began = time.monotonic()
    root = Path(folder)
    run_file = root / "run.toml"
    console.rule("[bold]1 of 5  the text: Python's standard library")
    try:
        write_corpus(root / "text")
    except FileNotFoundError as error:  # in a folder whose files the system makes
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another") from None
    write_run_file(run_file, root)
    run = load_run(run_file, [])
    console.rule("[bold]2 of 5  prepare: tokenizer, tokens, packed rows")
    prepare_command(run, ())
    console.rule("[bold]3 of 5  train")
    code = train_command(run)
    if code:
        again = f"lmwright quickstart {shlex.quote(folder)}"
        console.print(f"Run {again} again to continue from here.", markup=False, soft_wrap=True)
        return code
    finish(run_file, run.dir, console, began)
    return 0


def finish(run_file: Path, run_dir: str, console: Console, began: float) -> None:
    """Prints a sample, exports, and prints what to try next."""
    from lmwright.evals.held_out import eval_command
    from lmwright.evals.prompted import generate_command
    from lmwright.formats.convert import export_command

    console.rule("[bold]4 of 5  eval and generate")
    eval_command(run_dir)
    generate_command(run_dir, [PROMPTS[0]], max_new_tokens=80, temperature=0.7, seed=1)
    console.rule("[bold]5 of 5  export")
    out = Path(run_dir).parent / "hf"
    place, file = (shlex.quote(str(path)) for path in (run_dir, run_file))
    export_command(run_dir, out, overwrite=True)
    console.rule(f"[bold]done in {(time.monotonic() - began) / 60:.1f} minutes")
    console.print(
        f"""
  the model, for transformers and others   {out}
  curves, samples, configuration           {run_dir}/report.html

Next, with [bold]source .venv/bin/activate[/]:
  lmwright generate {place} --prompt "import os" --temperature 0.8
  lmwright config show {file}
  lmwright train {file} train.steps=2000
  lmwright prepare RUN.toml && lmwright train RUN.toml     # your own text: docs/prepare.md
""",
        highlight=False,
        soft_wrap=True,
    )


def write_corpus(folder: Path) -> None:
    """Writes code.jsonl and docstrings.jsonl, and their held-out counterparts, from the running
    Python; files that are right already are left alone."""
    rows: dict[str, list[str]] = {}
    for name, text in modules():
        held_out = xxhash.xxh3_64_intdigest(name.encode()) % HELD_OUT_IN == 0
        end = "-heldout.jsonl" if held_out else ".jsonl"
        docs = list(docstrings(text))
        rows.setdefault(f"code{end}", []).append(json.dumps({"id": name, "text": text}))
        rows.setdefault(f"docstrings{end}", []).extend(
            json.dumps({"id": f"{name}#{i}", "text": doc}) for i, doc in enumerate(docs)
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    for name, lines in rows.items():
        content = "\n".join(lines) + "\n"
        path = folder / name
        if not path.exists() or path.read_text() != content:
            write_whole(path, content)


def modules() -> Iterator[tuple[str, str]]:
    """(path below the library, source) of every module, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    count = 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED & set(parts):
            continue
        try:
            yield "/".join(parts), path.read_text(encoding="utf-8")
            count += 1
        except (UnicodeDecodeError, OSError):
            continue
    if not count:
        raise UserError(f"{root}: this Python ships no library sources; use another Python")


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, worth a line of text."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 80:
                yield text


def write_run_file(path: Path, root: Path) -> None:
    """Writes the run file of the quickstart, to be read and changed; an edited one is kept."""
    if path.exists():
        return
    sources = "".join(
        f"""
[[data.sources]]
name = "{name}"
path = {literal(str(root / "text" / file))}
use = "{use}"
"""
        for name, file, use in (
            ("code", "code.jsonl", "train"),
            ("docstrings", "docstrings.jsonl", "train"),
            ("heldout code", "code-heldout.jsonl", "eval"),
            ("heldout docstrings", "docstrings-heldout.jsonl", "eval"),
        )
    )
    name = shlex.quote(str(path))
    text = f"""# The whole quickstart as one run file; `lmwright config show {name}` resolves it.
recipe = "quickstart"
name = "quickstart"
dir = {literal(str(root / "run"))}

[data]
dir = {literal(str(root / "data"))}
{sources}
[eval]
prompts = {json.dumps(PROMPTS)}
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text)
