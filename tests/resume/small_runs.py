"""What the tests of resumed runs share: a run in a folder, its losses, and processes that train."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.formats.open import load_run
from tests.quick_compile import FLAGS
from tests.storage.fake_gcs import variables

STEPS = 12
CACHES = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "XDG_CACHE_HOME",
)
STORAGE = variables("").keys()


def in_dir(run: Run, folder: Path) -> Run:
    return replace(run, dir=str(folder))


def losses(run: Run) -> dict[int, float]:
    """Loss by step, each step once."""
    found = {}
    for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            assert row["step"] not in found, "a step was logged twice"
            found[row["step"]] = row["loss"]
    return found


def logged(run: Run, kind: str) -> list[dict]:
    """The lines of a kind in metrics.jsonl."""
    lines = (Path(run.dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def train_in_process(run: Run, before: str = "", devices: int = 1) -> subprocess.CompletedProcess:
    """Trains in a process of its own, after running the lines of `before`."""
    beside = run.dir if "://" not in run.dir else f"{os.environ['XDG_CACHE_HOME']}/run"
    run_file = Path(beside).with_suffix(".toml")
    run_file.parent.mkdir(parents=True, exist_ok=True)
    run_file.write_text(dump_toml(run))
    assert load_run(run_file, []) == run
    code = textwrap.dedent(before) + textwrap.dedent(f"""
        from lmwright.formats.open import load_run
        from lmwright.train.command import train_command
        raise SystemExit(train_command(load_run({str(run_file)!r}, [])))
    """)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
    )


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process that trains on CPU devices with the checkout under test."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count={devices}",
        "PATH": "/usr/bin:/bin",
        **{name: os.environ[name] for name in CACHES},
        **{name: os.environ[name] for name in STORAGE if name in os.environ},
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs `lmwright WORDS` in a folder, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "lmwright", *words],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
