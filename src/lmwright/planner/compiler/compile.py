"""Compile: a run's own train step, by the TPU's or the GPU's own compiler, on a host without one.

    Run --dump--> run.toml --child process--> answer.json, step.hlo --> Compiled

The compiler (`libtpu`, or JAX's plugin for CUDA) gives the verdict: the memory of one chip, or that
it does not fit.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.errors import UserError, install
from lmwright.guard.temporary import temporary_folder
from lmwright.hardware.slices import Slice, parse_slice
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.compiler import gpu
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.peak import peak_split
from lmwright.program.executable import refuse_option

TIMEOUT_S = 1800.0
CHILD = ("-m", "lmwright.planner.compiler.child")

# The compiler looks for a TPU, its metadata server and its lock file; none is wanted.
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10",  # `parts` knows parts by places in Python
}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_USED = re.compile(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM \(?([\d.]+)([KMGT]?)\)?")
_USED_OF = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's answer for one train step on one slice; bytes are of one device."""

    slice: str
    mesh: dict[str, int]
    num_params: int
    tokens_per_step: int
    flops_per_step: float
    weights_bytes: int
    optimizer_bytes: int
    lower_s: float
    compile_s: float
    fits: bool
    peak_bytes: int
    """Bytes of the most that is alive at once, and of code; what was asked for where it does not
    fit."""
    temp_bytes: int | None = None
    """Bytes of temporaries as the compiler reports them, which can be more than is alive at once;
    None where it does not fit."""
    argument_bytes: int | None = None
    code_bytes: int | None = None
    """Bytes of the program itself, a part of the peak."""
    host_bytes: int = 0
    """Bytes in the memory of the host."""
    limit_bytes: int | None = None
    """Bytes that the compiler may use; it says so only where a program does not fit."""
    error: str | None = None
    from_cache: bool = False
    """True if an earlier plan had asked the compiler for the same program."""
    step_kept: bool = False
    """True if `train` will find the compiled step (`program.executable`)."""
    hlo: str = field(default="", repr=False)
    """The optimized, scheduled program."""


def has_libtpu() -> bool:
    """True if the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def require_libtpu() -> None:
    """Raises UserError where the TPU compiler is not installed."""
    if not has_libtpu():
        raise UserError(f"the TPU compiler is not installed; {install('tpu')} (no TPU is needed)")


def compile_for(
    run: Run,
    where: Slice | Machine,
    *,
    trainees: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    program: Sequence[str] = CHILD,
) -> Compiled:
    """Compiles the train step of `run`, while these trainees still train (all if there are none),
    for the slice, or for a machine with GPUs, in a child process: Python with `program`, the run
    file, the slice and a folder for the answer.

    Raises UserError where the run cannot be laid out on the slice, the compiler is missing, fails
    or crashes, or the host has too little time or memory for it.
    """
    if isinstance(where, Slice):
        require_libtpu()
    else:
        gpu.require_cuda_compiler()
    with temporary_folder() as folder:
        run_file = Path(folder, "run.toml")
        run_file.write_text(dump_toml(run))
        command = [sys.executable, *program, str(run_file), where.name, folder, *trainees]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "LIBTPU_"))}
        try:
            done = subprocess.run(
                command, env=env | COMPILER_ENVIRONMENT | gpu.ENVIRONMENT,
                capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{where.name}: the compiler took longer than {timeout_s:.0f} s and was stopped; "
                f"run it again when the host is less busy"
            ) from None
        answer_file = Path(folder, "answer.json")
        if not answer_file.exists():
            raise _died(where.name, done)
        answer = json.loads(answer_file.read_text())
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        hlo = Path(folder, "step.hlo")
        compiled = _compiled(answer, hlo.read_text() if hlo.exists() else "")
        if isinstance(where, Slice):
            return compiled
        limit = where.usable_bytes
        assert limit is not None
        return replace(compiled, fits=compiled.peak_bytes <= limit, limit_bytes=limit)


class HostMemoryError(UserError):
    """The host, not the slice, has too little memory for the compiler."""


# Of a process that could not get memory: Python's, C++'s, LLVM's, the kernel's and XLA's words.
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|LLVM ERROR: out of memory|Cannot allocate memory|"
    r"Out of memory allocating|failed to map segment"
)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


# How C++ and LLVM begin their last words; a stack of addresses follows.
_LAST_WORDS = re.compile(r"Check failed|LLVM ERROR|terminate called|what\(\):|^F\d{4} |\*\*\* SIG")
_SHOWN = 400  # letters of what the compiler says; its messages can hold whole programs


def _died(name: str, done: subprocess.CompletedProcess) -> Exception:
    if done.returncode in _KILLED or _NO_MEMORY.search(done.stderr):
        return _no_memory(name)
    number = -done.returncode if done.returncode < 0 else done.returncode - 128
    crashed = number in list(signal.Signals)
    if not crashed and "Traceback" in done.stderr:  # our own mistake
        return RuntimeError(f"the compiler's process ended with {done.returncode}:\n{done.stderr}")
    end = signal.Signals(number).name if crashed else f"exit code {done.returncode}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    words = [line for line in lines if _LAST_WORDS.search(line)] or lines[-1:]
    return _failed(name, f"crashed with {end}", " ".join(words))


def _failed(name: str, verb: str, text: str) -> UserError:
    """The error of a compiler that gave no answer, with what it said."""
    text = " ".join(text.split()).rstrip(".")
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    words = f"said: {text}" if text else "said nothing"
    return UserError(
        f"{name}: the {'CUDA' if name.startswith('gpu:') else 'TPU'} compiler {verb} and {words}; "
        f"change the mesh, train.remat or train.compiler_options, or ask with --quick"
    )


def _no_memory(name: str) -> HostMemoryError:
    return HostMemoryError(
        f"{name}: this host ran out of memory while compiling (this says nothing about the "
        "slice); close other programs, use a host with more memory, or ask with --quick"
    )


def _compiled(answer: dict[str, Any], hlo: str) -> Compiled:
    known = {k: v for k, v in answer.items() if k in Compiled.__dataclass_fields__}
    if "error" not in answer:
        return Compiled(**known, fits=True, peak_bytes=device_peak_bytes(answer, hlo), hlo=hlo)
    if "hbm" not in answer["error"].lower() and _NO_MEMORY.search(answer["error"]):
        raise _no_memory(answer["slice"])
    refuse_option(answer["error"])
    sizes = memory_of_error(answer["error"])
    if sizes is None:
        raise _failed(answer["slice"], "failed", answer["error"])
    return Compiled(**known, fits=False, peak_bytes=sizes[0], limit_bytes=sizes[1])


def device_peak_bytes(answer: dict[str, Any], hlo: str) -> int:
    """Bytes of a chip's memory at the fullest moment of a program that fits, and its code.

    Arguments and temporaries added up can exceed the memory that they fit. The compiler's live
    bytes are all arguments, and the most that is alive at once in one memory, the chip's or the
    host's; where that may be the host's, the temporaries of the chip are counted in the program."""
    given, code = answer["argument_bytes"], answer["code_bytes"]
    far = answer.get("host_argument_bytes", 0)
    alive, host = answer["live_bytes"] - given - far, answer.get("host_bytes", 0) - far
    if not host or alive > host:
        return given + alive + code
    alive = min(sum(peak_split(parse(hlo)).values()), answer["temp_bytes"])
    peak = given + alive + code
    return min(peak, parse_slice(answer["slice"]).family.peak.usable_bytes or peak)


def memory_of_error(text: str) -> tuple[int, int] | None:
    """(asked, available) bytes in the compiler's message about a chip's memory; None in another."""
    match = _USED.search(text) or _USED_OF.search(text)
    if match is None:
        return None
    number = lambda i: int(float(match[i]) * _UNITS[match[i + 1]])  # noqa: E731
    return number(1), number(3)
