"""Modules, read by each worker from another place on; conftest.py imports this before JAX.

On a fresh checkout Python has compiled none of them. In one order all workers compile all of them,
each module at the same moment; from other places on they find most of them compiled.
"""

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
NUMBER = int(WORKER.removeprefix("gw"))
LARGE = (
    ("jax", "orbax.checkpoint", "datasets"),
    ("torch", "transformers", "transformers.modeling_utils", "peft"),
    ("scipy.stats", "sklearn.base", "sympy"),
)
"""What the first, the second and the third of several workers read before all else."""

# torch's threads wait for each other by spinning: two workers of two threads each on two cores
# take ten times the CPU of one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")


def read(names):
    """Imports modules; what fails is told when pytest comes to it."""
    for name in names:
        with suppress(Exception, pytest.skip.Exception):
            import_module(name)


def read_apart(args):
    """Imports all modules of tests in a worker that is to run all."""
    if "PYTEST_XDIST_WORKER" in os.environ and [Path(arg).resolve() for arg in args] == [ROOT]:
        files = sorted(ROOT.rglob("test_*.py"))
        start = len(files) * NUMBER // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        names = [".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in files]
        read(names[start:] + names[:start])


if "PYTEST_XDIST_WORKER" in os.environ:
    read(LARGE[NUMBER % len(LARGE)])
