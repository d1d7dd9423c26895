"""Environment variables that must be set before jax is imported."""

import glob
import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from lmwright.errors import TransientError, UserError
from lmwright.guard.private import make_private
from lmwright.hardware import compiled, driver

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")

# Read when jax is imported; whatever the user has set stays.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA's warnings would tear the live display
    compiled.FOLDER: os.path.join(CACHE, "lmwright", "compiled"),
}

# Where none of these is, a TPU compiler that is installed must not look for a TPU.
TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")
ACCELERATORS = (*TPUS, "/dev/nvidia[0-9]*", "/dev/dri/render*")


def set_environment() -> None:
    """Sets what jax reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        if (
            name == compiled.FOLDER
            and name not in os.environ
            and (problem := make_private(Path(value)))
        ):
            print(f"lmwright: compiled programs are not cached: {problem}", file=sys.stderr)
            continue  # JAX would run what it finds there
        os.environ.setdefault(name, value)
    if find_spec("libtpu") and not is_there(ACCELERATORS):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    driver.listen()
    compiled.listen()


def no_platform(error: BaseException) -> UserError | None:
    """The error to show for one of JAX that has no such platform as JAX_PLATFORMS asks for; None
    for others, and for a TPU that is there, which may be in use."""
    found = re.match(r"Unable to initialize backend '(\w+)'", str(error))
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if found is None or not isinstance(error, RuntimeError):
        return None
    name, asked = found[1], wanted.split(",")
    if name not in asked:  # JAX tries both for gpu
        name = "gpu" if name in ("cuda", "rocm") and "gpu" in asked else ""
    if not name or (name == "tpu" and is_there(TPUS)):
        return None
    if name == "gpu" and driver.has_card():
        return driver.lost()
    kind = TransientError if name == "tpu" else UserError  # a new machine may have it
    return kind(
        f"JAX_PLATFORMS={wanted}: JAX finds no platform {name!r} on this machine; set "
        "JAX_PLATFORMS=cpu, or leave it out"
    )


def is_there(patterns: Iterable[str]) -> bool:
    """True if a device file matches one of the patterns."""
    return any(glob.glob(pattern) for pattern in patterns)
