"""Tokens per second of lmwright on one GPU, beside torch, Liger, PEFT, Unsloth and transformers.

    python benchmarks/train_gpu.py --row 135m-8x2k            # a row, in less than ten minutes
    python benchmarks/train_gpu.py --all --budget-s 540       # as many as there is time for
    python benchmarks/train_gpu.py --table gpu.jsonl          # the tables, in Markdown
    python benchmarks/train_gpu.py --all --device cpu --tiny  # try the script without a card

Each contestant has the card to itself, in its own process; a record of it is added to the file of
`--results`. One that has a record there is not run again (unless `--again`), so the same command
goes on where it stopped; give it the file of the last session where a rented card comes bare. The
median of 3 x 10 steps counts, after those that compile. To save rented time, `--beside 3` lets
three compile at once; each still has the card to itself while it is timed, and the time to its
second step is left out of the tables, and those that had no memory beside others run again alone,
at the end. The wait for its turn does not count in `--contestant-s`.

No network is needed. Packages that the machine lacks may lie as wheels in the folder of `--wheels`;
each contestant gets only its own, and of these only what is not installed. Fill it where there is
network by

    pip download --no-deps --only-binary=:all: --python-version 3.12 --dest=wheels \\
        $(python benchmarks/train_gpu.py --wheel-names --only lmwright,liger)
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()

import gpu_results  # noqa: E402
from gpu_rows import ROWS, WAITS, speed  # noqa: E402

ROW_S = 570  # a row, of all its contestants
LOOK_S = 0.5
LEAST_S = 45  # what a contestant needs to get anywhere
NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory", re.I)
SOURCE = Path(__file__).resolve().parents[1] / "src"
WHEELS = {
    "lmwright": (
        "lmwright", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "tomli-w",
        "zstandard", "xxhash", "optax", "orbax-checkpoint", "etils", "tokamax", "einshape", "qwix",
        "immutabledict", "tensorboardX", "xprof", "fire", "termcolor", "six", "plotly",
    ),
    "liger": ("liger-kernel",),
    "peft": ("peft",),
    "unsloth": ("unsloth", "unsloth-zoo", "trl", "cut-cross-entropy", "bitsandbytes", "xformers"),
}  # fmt: skip


@dataclass
class Bench:
    """Contestants of rows, one after the other, until the time is up."""

    args: argparse.Namespace
    folder: Path
    """For what is installed and compiled; empty at the start."""
    installed: dict[str, str] = field(default_factory=dict)
    """By library: why its wheels could not be installed; empty where they could."""
    ends: dict[str, float] = field(default_factory=dict)
    """By row that has begun: when it is to end."""
    crowded: list[tuple[str, str]] = field(default_factory=list)
    """Rows and contestants that had no memory beside others."""

    @cached_property
    def machine(self) -> dict[str, Any]:
        return gpu_results.machine(self.args.device)

    def left(self) -> float:
        """Seconds of the session that are left."""
        return self.args.budget_s - (time.perf_counter() - BEGAN)

    def run(self, rows: list[str]) -> None:
        """Measures what has no record yet, in order of importance."""
        seen = {gpu_results.key(record) for record in gpu_results.read(self.args.results)}
        running = []
        with ThreadPoolExecutor(self.args.beside) as beside:
            for name in rows:
                for contestant in self.chosen(name):
                    about = self.about(name, contestant)
                    if self.args.again or gpu_results.key(about) not in seen:
                        self.install(contestant.split("-")[0])
                        running.append(beside.submit(self.one, name, contestant, about))
        for each in running:
            each.result()  # tells of our own mistakes
        self.args.beside = 1
        for name, contestant in self.crowded:
            self.one(name, contestant, self.about(name, contestant))

    def one(self, name: str, contestant: str, about: dict[str, Any]) -> None:
        """Measures a contestant of a row and appends its record."""
        ends = self.ends.setdefault(name, time.perf_counter() + ROW_S)
        limit = min(self.left(), ends - time.perf_counter(), self.args.contestant_s)
        if limit < min(LEAST_S, self.args.contestant_s):
            print(f"{name} {contestant}: no time left", flush=True)
            return
        record = self.measure(name, contestant)
        if record is None:
            print(f"{name} {contestant}: stopped, the time is up", flush=True)
            return
        if self.args.beside > 1 and NO_MEMORY.search(record.get("error", "")):
            print(f"{name} {contestant}: no memory beside the others, again at the end", flush=True)
            self.crowded.append((name, contestant))
            return
        gpu_results.append(self.args.results, about | record)
        print(f"{name} {contestant}: {self.told(record)}", flush=True)

    def chosen(self, name: str) -> Iterator[str]:
        """Contestants of a row that are asked for."""
        only = self.args.only.split(",") if self.args.only else None
        for contestant in ROWS[name].contestants:
            if only is None or contestant in only or contestant.split("-")[0] in only:
                yield contestant

    def about(self, name: str, contestant: str) -> dict[str, Any]:
        """The part of a record that is known before."""
        changes = self.args.set if contestant.startswith("lmwright") else []
        about = {"row": name, "contestant": contestant, "tiny": self.args.tiny}
        about |= {"beside": self.args.beside} if self.args.beside > 1 else {}
        return about | {"changes": changes, "machine": self.machine}

    @staticmethod
    def told(record: dict[str, Any]) -> str:
        """A line for the terminal."""
        median = speed(record)
        if median is None:
            return record["error"]
        peak = record["peak_bytes"] / 2**30
        return (
            f"{median:,.0f} tokens/s, {peak:.1f} GiB, second step after {record['ready_s']:.0f} s"
        )

    def measure(self, name: str, contestant: str) -> dict[str, Any] | None:
        """A contestant's record; None if it was stopped because the row's or the session's time
        is up."""
        library = contestant.split("-")[0]
        if problem := self.install(library):
            return {"error": problem}
        command = [sys.executable, os.path.abspath(__file__), "--worker", name, contestant]
        command += ["--device", self.args.device, *(["--tiny"] if self.args.tiny else [])]
        command += [word for change in self.args.set for word in ("--set", change)]
        turn = self.args.turn or self.folder / "turn"
        command += ["--turn", str(turn)] if self.args.beside > 1 else []
        command += ["--traces", str(self.args.traces.resolve())] if self.args.traces else []
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as caches,
            tempfile.TemporaryFile() as err,
        ):
            worker = subprocess.Popen(
                command, env=self.variables(library, caches), stdout=subprocess.PIPE, stderr=err,
                text=True, start_new_session=True, cwd=caches,
            )  # fmt: skip
            try:
                out = self._output(worker, self.ends[name], Path(caches, WAITS))
            except TimeoutError:
                return {"error": f"not done within {self.args.contestant_s:g} s (--contestant-s)"}
            finally:
                _end(worker)
            if out is None:
                return None
            if out.strip():
                return json.loads(out.splitlines()[-1])
            err.seek(0)
            lines = err.read().decode(errors="replace").strip().splitlines()
            return {"error": f"ended with code {worker.returncode}: {(lines or ['silent'])[-1]}"}

    def _output(self, worker: subprocess.Popen, ends: float, waits: Path) -> str | None:
        """What a worker writes; None if the row's or the session's time is up before. Raises
        TimeoutError if its own is, in which the time does not count while `waits` is there."""
        began, waited = time.perf_counter(), 0.0
        while True:
            asked = time.perf_counter()
            try:
                return worker.communicate(timeout=LOOK_S)[0]
            except subprocess.TimeoutExpired:
                now = time.perf_counter()
            waited += (now - asked) * waits.exists()
            if now - began - waited > self.args.contestant_s:
                raise TimeoutError
            if self.left() < 0 or now > ends:
                return None

    def variables(self, library: str, caches: str) -> dict[str, str]:
        """Environment of a contestant: one card, nothing compiled before, its own packages."""
        own = [str(self.folder / library)]
        if library == "lmwright" and SOURCE.is_dir():
            own.append(str(SOURCE))
        said = {name: v for name, v in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        # a user's JAX takes three quarters of the card; the largest rows may need more
        fixed = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        if self.args.beside > 1:
            fixed["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return fixed | said | {
            "PYTHONPATH": os.pathsep.join([*own, *_paths(said.get("PYTHONPATH", ""))]),
            "JAX_PLATFORMS": {"gpu": "cuda"}.get(self.args.device, self.args.device),
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TF_CPP_MIN_LOG_LEVEL": "2",
        }  # fmt: skip

    def install(self, library: str) -> str:
        """Installs a library's wheels for it alone; returns what went wrong."""
        if library not in self.installed:
            self.installed[library] = self._install(library)
        return self.installed[library]

    def _install(self, library: str) -> str:
        wheels = self.args.wheels
        brought = _wheels(wheels) if wheels else set()
        names = [n for n in WHEELS.get(library, ()) if _plain(n) in brought and not _is_there(n)]
        if not names:
            return ""
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += [
            "--find-links",
            str(wheels.resolve()),
            "--target",
            str(self.folder / library),
            *names,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        return f"wheels: {lines[-1]}" if done.returncode else ""


def _paths(variable: str) -> list[str]:
    """Folders of PYTHONPATH, as seen from anywhere."""
    return [os.path.abspath(path) for path in variable.split(os.pathsep) if path]


def wheel_names(libraries: list[str]) -> list[str]:
    """Packages whose wheels may be brought along, but ours, which runs from its source."""
    return sorted({name for library in libraries for name in WHEELS[library]} - {"lmwright"})


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _wheels(folder: Path) -> set[str]:
    return {_plain(path.name.split("-")[0]) for path in folder.glob("*.whl")}


def _is_there(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return name != "lmwright"


def _end(worker: subprocess.Popen) -> None:
    """Ends a contestant and the compilers that it started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--row", action="append", default=[], choices=ROWS, help="may be given several times")
    add("--all", action="store_true", help="every row, the most important first")
    add("--only", help="comma-separated contestants or libraries")
    add("--results", type=Path, default=Path("gpu.jsonl"), help="file that records are added to")
    add("--again", action="store_true", help="also what has a record there")
    add("--budget-s", type=float, default=float("inf"), help="seconds, for all together")
    add("--contestant-s", type=float, default=240.0, help="seconds, for each contestant")
    add("--beside", type=int, default=1, metavar="N", help="contestants that get ready together")
    add("--turn", type=Path, help=argparse.SUPPRESS)
    add("--wheels", type=Path, help="folder of wheels that were brought along")
    add("--wheel-names", action="store_true", help="print what may lie there")
    add("--device", choices=("gpu", "cpu"), default="gpu")
    add("--tiny", action="store_true", help="tiny shapes, to try the script")
    add("--set", action="append", default=[], metavar="A.B=C", help="field of our run to change")
    add("--traces", type=Path, help="folder for a trace of three steps of ours, of each row")
    add("--table", type=Path, help="print the tables of a file of records")
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        from gpu_steps import work

        return work(*args.worker, args.device, args.tiny, args.set, args.traces, args.turn, BEGAN)
    if args.wheel_names:
        return print(*wheel_names(args.only.split(",") if args.only else [*WHEELS]))
    if args.table:
        return print(gpu_results.table(gpu_results.read(args.table)))
    rows = list(ROWS) if args.all else args.row
    if not rows:
        sys.exit(f"say --all or --row: {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="lmwright-gpu-") as folder:
        Bench(args, Path(folder)).run(rows)


if __name__ == "__main__":
    main()
