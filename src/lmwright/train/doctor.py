"""Doctor: what lmwright finds on this machine, and what to install for more."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from lmwright.errors import UserError, install
from lmwright.hardware import driver
from lmwright.hardware.environment import ACCELERATORS, is_there
from lmwright.train.environment import describe_environment

GIB = 2**30
NEEDS = {"tpu": ("libtpu",), "cuda12": ("jax-cuda12-plugin",), "cuda13": ("jax-cuda13-plugin",)}
"""Packages of extras that name another package's extra."""
FOR = {
    "hf": "datasets and models of the Hugging Face hub",
    "gguf": "GGUF files",
    "eval": "benchmarks of lm-evaluation-harness",
    "records": "TFRecord and ArrayRecord files",
    "wandb": "Weights & Biases",
    "trackio": "trackio",
    "tpu": "TPUs, and plans by their compiler on machines without one",
    "cuda12": "NVIDIA cards with CUDA 12",
    "cuda13": "NVIDIA cards with CUDA 13",
    "gcs": "buckets (gs://)",
    "cloud": "TPU slices of Google Cloud",
    "gke": "TPU slices of Kubernetes",
    "kaggle": "Kaggle's TPU and datasets",
}
REQUIREMENT = re.compile(r"([\w.-]+).*?;.*?extra == ['\"]([\w-]+)['\"]")
TPUS = ACCELERATORS[:2]


def doctor_command(*, as_json: bool = False) -> int:
    """Prints versions, devices, memory, disk and extras, and what is wrong with its cure. Returns
    0, or 1 if something is wrong."""
    found = describe_machine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_lines(found)))
    return 1 if found["problems"] else 0


def describe_machine() -> dict[str, Any]:
    """The environment as env.json has it, with disk, extras and problems, as JSON values."""
    disk = shutil.disk_usage(".")
    about = {"disk_free_bytes": disk.free, "extras": _extras()}
    try:
        about = {**describe_environment(), **about}
    except (UserError, RuntimeError) as error:
        return {**about, "problems": [str(driver.refusal(error) or error)]}
    return {**about, "problems": [*_problems(about)]}


def _extras() -> dict[str, bool]:
    """Extras of this package, and whether all that they name is installed."""
    packages: dict[str, set[str]] = {name: set(more) for name, more in NEEDS.items()}
    try:
        requirements = metadata.requires("lmwright") or []
    except metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        if match := REQUIREMENT.match(requirement):
            package, extra = match.groups()
            if extra not in NEEDS:
                packages.setdefault(extra, set()).add(package)
    return {extra: all(map(_is_installed, packages[extra])) for extra in FOR if extra in packages}


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _problems(about: Mapping[str, Any]) -> Iterator[str]:
    # a CPU that was asked for is none
    on_cpu = about["device_platform"] == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu"
    if on_cpu and driver.has_card():
        yield str(driver.lost())
    if on_cpu and is_there(TPUS):
        why = "another process may hold it" if find_spec("libtpu") else install("tpu")
        yield f"a TPU is here and not used: {why}"
    if about["disk_free_bytes"] < GIB:
        yield "less than 1 GiB is free on the disk of this folder; checkpoints may not fit"


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    if "packages" in facts:
        commit = f" ({facts['git_commit']})" if facts["git_commit"] else ""
        versions = ", ".join(f"{n} {v}" for n, v in facts["packages"].items() if n != "lmwright")
        yield f"lmwright {facts['packages'].get('lmwright', '?')}{commit}"
        yield f"Python {facts['python']}, {versions}"
        yield f"{facts['platform']}; {facts['cpu']}, {facts['cpu_cores']} cores"
        yield (
            f"{facts['device_count']} x {facts['device_kind']}; memory "
            f"{facts['memory_bytes'] / GIB:.1f} GiB; disk {facts['disk_free_bytes'] / GIB:.1f} GiB "
            "free"
        )
        yield from (f"{name}={value}" for name, value in facts["variables"].items())
    there = [name for name, installed in facts["extras"].items() if installed]
    yield f"extras that are installed: {', '.join(there) or 'none'}"
    for name, installed in facts["extras"].items():
        if not installed and (driver.has_card() or not name.startswith("cuda")):
            yield f"  for {FOR[name]}: {install(name)}"
    yield from (f"PROBLEM: {problem}" for problem in facts["problems"])
