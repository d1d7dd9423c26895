"""env.json: the machine and software of a run: versions, commit, devices, variables that change
speed.

No host name, no user, no path of the home folder, nothing named like a secret. A run that
is resumed on another machine keeps the environments it had before under `earlier`.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import lmwright
from lmwright.data.json_text import parse_json
from lmwright.guard.files import write_whole
from lmwright.guard.redact import redact

ENV_FILE = "env.json"
PACKAGES = ("lmwright", "jax", "jaxlib", "libtpu", "numpy", "optax", "orbax-checkpoint")
VARIABLE_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "OMP_", "MKL_", "CUDA_", "NCCL_")
VARIABLES = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "PYTHONHASHSEED")


def write_env(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `run_dir/env.json` (whole or not at all) and returns its path; process 0 only."""
    path = Path(run_dir) / ENV_FILE
    env = describe_environment()
    earlier = _read(path)
    if earlier is not None:
        before = earlier.pop("earlier", [])
        if earlier != env:
            before = [*before, earlier]
        if before:
            env["earlier"] = before
    write_whole(path, json.dumps(env, indent=2) + "\n")
    return path


def describe_environment() -> dict[str, Any]:
    """Versions, platform, devices and chosen variables of this process, as JSON values."""
    import jax
    import psutil

    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "packages": _versions(),
        "git_commit": _git_commit(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device_kind": device.device_kind,
        "device_platform": device.platform,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "variables": redact(_chosen(os.environ)),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # libtpu is only on TPU hosts; lmwright may run from its source tree
    return versions


def _chosen(variables: Mapping[str, str]) -> dict[str, str]:
    home = os.path.expanduser("~")
    return {
        name: variables[name].replace(home, "~") if len(home) > 1 else variables[name]
        for name in sorted(variables)
        if name.startswith(VARIABLE_PREFIXES) or name in VARIABLES
    }


def _git_commit() -> str | None:
    """Commit of the source tree that lmwright runs from; None for an installed package."""
    package = Path(lmwright.__file__).parent
    root = package.parent.parent
    # An installed copy may lie inside the repository of somebody else's project.
    if not (root / "pyproject.toml").exists() or package.parent.name != "src":
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit and _git(root, "status", "--porcelain", "--untracked-files=no"):
        commit += " with local changes"
    return commit


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        env = parse_json(path)
    except (OSError, ValueError):
        return None  # none yet, or torn by a crash: it is written anew
    return env if isinstance(env, dict) else None
