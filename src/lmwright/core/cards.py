"""NVIDIA cards that JAX cannot use, or whose memory is too small: one sentence with the cure.

Where its CUDA plugin fails, JAX logs a traceback and goes on with the CPU, or raises an error that
names no cure. Nobody who pays for a card should train on its CPU unknowingly.
"""

import functools
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

from lmwright.errors import UserError, install
from lmwright.hardware import driver
from lmwright.hardware.devices import gpu_name
from lmwright.hardware.driver import gib

NAMES = {"cuda", "gpu"}  # of the platform, in JAX_PLATFORMS
FULL = re.compile(driver.FULL, re.I)
KERNEL = re.compile("shared memory", re.I)  # of a core, of which a kernel asks for too much
LIBRARY = re.compile(r"(CUDNN|CUBLAS)_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)|DNN library init", re.I)
WANTED = re.compile(r"allocate (?:request for )?([\d.]+ ?(?:[KMGT]i?B|bytes))", re.I)
ROOM = 3 * 2**30  # for JAX's context and libraries, which its allocator does not count


@functools.cache
def refuse_lost_card() -> None:
    """Starts JAX's devices. Raises UserError where this machine has an NVIDIA card that JAX cannot
    use, unless JAX_PLATFORMS or CUDA_VISIBLE_DEVICES leaves it out; notes a CPU that may not be
    meant."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    asked = set(filter(None, (platforms or "").split(",")))
    if asked and not asked & NAMES:
        return
    driver.listen()
    try:
        platform = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:
        refused = driver.refusal(error)
        if refused is None:
            raise
        raise refused from error
    if platform != "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    cuda, card = driver.cuda_of_plugin(), driver.has_card()
    if cuda and card:
        raise driver.lost()
    if cuda:
        _note("JAX's CUDA plugin finds no NVIDIA card; JAX_PLATFORMS=cpu says that this is meant")
    elif card:
        _note(
            f"JAX has no plugin for this machine's NVIDIA card; for it, {install(driver.extra())}"
        )


def _note(text: str) -> None:
    print(f"note: computing on the CPU: {text}", file=sys.stderr)


def is_full(error: BaseException) -> bool:
    """True for an error of JAX that says that the memory of a device is full."""
    text = str(error)
    of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return of_jax and bool(FULL.search(text)) and not KERNEL.search(text)


def out_of_memory(error: BaseException, training: bool = True) -> UserError | None:
    """The error to raise for one of JAX that says that a card's memory is full; None for others."""
    text = str(error)
    of_library = isinstance(error, jax.errors.JaxRuntimeError) and LIBRARY.search(text)
    if not is_full(error) and (not of_library or KERNEL.search(text)):
        return None
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    stats = device.memory_stats() or {}
    card = driver.memory_bytes()
    return UserError(memory_sentence(text, device.device_kind, stats, card, training))


def memory_sentence(
    text: str, kind: str, stats: Mapping[str, Any], card: tuple[int, int] | None,
    training: bool = True,
) -> str:  # fmt: skip
    """A sentence on a full card: what was asked for and free, who holds the rest, and the cure."""
    wanted = WANTED.search(text)
    used, limit = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
    facts = [f"{wanted[1]} more were asked for"] if wanted else []
    if limit:
        facts.append(f"JAX uses {gib(used)} of the {gib(limit)} that it may take")
    others = 0
    if card is not None:
        facts.append(f"{gib(card[1])} of the card's {gib(card[0])} are free")
        others = card[0] - card[1] - max(stats.get("pool_bytes", limit), used)
    head = f"out of memory on {kind}" + (f": {', '.join(facts)}" if facts else "")
    if others > ROOM:
        return (
            f"{head}; other processes hold about {gib(others)}: end them (nvidia-smi lists them)"
            + (", or train with fewer rows or train.remat=block" if training else "")
        )
    if not FULL.search(text):
        return (
            f"{head}; cuDNN and cuBLAS need some beside JAX's: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.6, and close other programs that nvidia-smi lists"
        )
    if not training:
        return f"{head}; shorter or fewer texts at a time, or --precision bf16, need less"
    name = gpu_name(kind)
    plan = f"`lmwright plan RUN --on gpu:{name}x1`" if name else "`lmwright plan RUN --quick`"
    more = ""
    if card is not None and 0 < limit < 0.85 * card[0]:
        more = "; XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 lets JAX take more of the card"
    return (
        f"{head}; set train.remat=block, a larger train.num_microbatches or a smaller "
        f"train.global_batch_size: {plan} says what fits{more}"
    )
