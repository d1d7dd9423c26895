"""The NVIDIA driver of this machine, and JAX's plugin for it: facts that need no jax."""

import glob
import logging
import os
import re
import shutil
import subprocess
import traceback
from importlib.util import find_spec
from pathlib import Path

from lmwright.errors import UserError, first_line, install

CARDS = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so.1")
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
LOGGER = "jax._src.xla_bridge"
OF_CUDA = re.compile(r"jax_cuda|xla_cuda|CUDA|NVIDIA")
FULL = r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|out of memory"
LEAST = {12: 525, 13: 580}  # driver that a version of CUDA needs


heard: list[str] = []
"""Reasons that JAX logged for CUDA plugins that failed."""


def has_card() -> bool:
    """True if the machine shows an NVIDIA card, whether or not its driver works."""
    return KERNEL_MODULE.is_file() or any(glob.glob(pattern) for pattern in CARDS)


def version() -> str:
    """Version of the driver, such as 580.65.06; empty where it is not known."""
    try:
        text = KERNEL_MODULE.read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(\d{3,}(?:\.\d+)+)\s", text)
    return found[1] if found else ""


def cuda_of_plugin() -> int | None:
    """Version of CUDA that JAX's plugin is built for; None where it is not installed."""
    return next((cuda for cuda in (13, 12) if find_spec(f"jax_cuda{cuda}_plugin")), None)


def extra() -> str:
    """The extra of lmwright that fits the driver."""
    number = version().partition(".")[0]
    return "cuda12" if number and int(number) < LEAST[13] else "cuda13"


def memory_bytes() -> tuple[int, int] | None:
    """Memory of the first card that this process sees, all and free, as the driver counts; None
    where it cannot say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    if shown := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]:
        command.append(f"--id={shown}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = re.match(r"(\d+), (\d+)", done.stdout)
    if done.returncode or numbers is None:
        return None
    total, free = (int(number) * 2**20 for number in numbers.groups())
    return total, free


def listen() -> None:
    """Keeps JAX's log of CUDA plugins that fail, with its traceback, off the terminal: `heard` has
    the reasons."""
    logger = logging.getLogger(LOGGER)
    if _keep not in logger.filters:
        logger.addFilter(_keep)


def _keep(record: logging.LogRecord) -> bool:
    if not OF_CUDA.search(record.getMessage()):
        return True
    if record.exc_info and record.exc_info[1]:
        heard.append(_cause(record.exc_info[1]))
    return False


def refusal(error: BaseException) -> UserError | None:
    """The error to show for one of JAX that has no card for a platform that was asked for, or that
    its plugin promised; None for others."""
    if isinstance(error, AssertionError):  # JAX_PLATFORMS=cuda where there is no card
        frames = traceback.extract_tb(error.__traceback__)
        ours = bool(frames) and frames[-1].filename.endswith("xla_bridge.py")
    else:
        ours = isinstance(error, RuntimeError) and "backend 'cuda'" in str(error)
    return lost(_cause(error)) if ours else None


def lost(cause: str = "") -> UserError:
    """The error for a card that JAX does not use, with the reason that JAX gave."""
    cause = heard[-1] if heard else cause
    cpu = "JAX_PLATFORMS=cpu computes on the CPU instead"
    if not has_card():
        return UserError(
            "JAX finds no NVIDIA card on this machine: `nvidia-smi` must list it (a container sees "
            f"what its --gpus option says); {cpu}"
        )
    return UserError(f"JAX cannot use this machine's NVIDIA card: {_reason(cause)}; {cpu}")


def _reason(cause: str) -> str:
    """Why JAX does not use the card, and the cure."""
    cuda, driver = cuda_of_plugin(), version()
    if cuda is None:
        return f"its CUDA plugin is not installed; {install(extra())}"
    if re.search(FULL, cause, re.I):
        memory = memory_bytes()
        free = f"{gib(memory[1])} of {gib(memory[0])} are free" if memory else cause
        return f"too little of its memory is left ({free}); end the processes that nvidia-smi shows"
    if driver and int(driver.partition(".")[0]) < LEAST[cuda]:
        other = f", or {install(extra())}" if extra() != f"cuda{cuda}" else ""
        return (
            f"its driver {driver} is older than {LEAST[cuda]}, which the extra cuda{cuda} needs; "
            f"update the driver{other}"
        )
    if re.match("Unable to load|Outdated", cause):
        return f"parts of CUDA are missing or old ({cause}); {install(f'cuda{cuda}')}"
    known = f"driver {driver} does" if driver else "driver is missing or does"
    said = f" (JAX says: {cause})" if cause else ""
    return f"its {known} not answer{said}; make `nvidia-smi` list the card first"


def _cause(error: BaseException) -> str:
    """The reason in JAX's message, without places in its source and its advice."""
    text = first_line(error).removeprefix("Unable to initialize backend 'cuda': ")
    text = re.sub(r"^\S+\.cc:\d+: | \([^()]*JAX_PLATFORMS[^()]*\)$", "", text)
    return text.split(". ")[0].rstrip(".")


def gib(size: float) -> str:
    """A size as text, in GiB."""
    return f"{size / 2**30:.1f} GiB"
