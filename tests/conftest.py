"""What all tests have in common; which devices they see is said in `tests/environment.py`."""

import ctypes
import gc
import os
import sys
import tomllib
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests import environment  # noqa: F401, before one of the others imports JAX
from tests.read_apart import read_apart
from tests.shared_context import share_context
from tests.shared_states import share_states
from tests.shared_steps import share_steps

# Tracing makes and drops many small objects beside the million of what is imported, which at
# Python's thresholds is walked again and again: four tenths of the time of a trace.
gc.set_threshold(20_000, 20, 20)
hypothesis.settings.register_profile("untimed", deadline=None)  # no time is asserted
hypothesis.settings.load_profile("untimed")

MANY_DEVICES = ("cloud", "earlier", "resume", "storage", "train/test_distill_run.py")
COMPUTE_MODELS = ("adapters", "evals", "formats", "models", "objectives", "parity")
MOST_BYTES = 3 * 2**30  # of a worker
LONG = tomllib.loads(Path(__file__).with_name("long_cases.toml").read_text())
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    read_apart(session.config.args)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by mark
def pytest_collection_modifyitems(items):
    """Marks the long cases slow; one that is not there any more is an error."""
    root = Path(__file__).parent
    missing = {}
    for item in items:
        file = item.path.relative_to(root).as_posix()
        if (long := LONG.get(file)) is None:
            continue
        quick = long.get("quick", ())
        missing.setdefault(file, {*long, *quick} - {"*", "quick"}).discard(item.name)
        if item.name in long or ("*" in long and item.name not in quick):
            item.add_marker(pytest.mark.slow)
    gone = [f"{file}::{name}" for file, names in missing.items() for name in names]
    named = any("::" in str(argument) for argument in sys.argv[1:])
    if gone and not named and SHARED.is_dir():
        raise pytest.UsageError(
            f"tests/long_cases.toml: there are no such cases: {', '.join(gone)}"
        )


def pytest_collection_finish():
    """What was imported stays; the collector need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends a worker at once, whose results are known: Orbax's threads of saves that failed, as they
    should, would keep it for minutes, and xdist waits ten seconds before it kills one."""
    if hasattr(config, "workerinput"):
        os._exit(0)


@pytest.fixture(autouse=True)
def no_mesh_left():
    """A mesh set for good by one test would be every later test's of the same worker."""
    yield
    if "jax" in sys.modules:
        mesh = sys.modules["jax"].sharding.get_abstract_mesh()
        assert mesh.empty, f"this test leaves a mesh set, say `with jax.set_mesh(...)`: {mesh}"


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_do_not_pile_up():
    """Hundreds of modules leave a worker with 7 GiB of programs that nobody runs again."""
    yield
    if "jax" in sys.modules and psutil.Process().memory_info().rss > MOST_BYTES:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def each_step_compiled_once():
    """Runs of this process share the programs of first states and steps that are the same, and
    programs a context."""
    share_states()
    share_steps()
    share_context()


@pytest.fixture(autouse=True)
def only_the_branch_of_cpus_is_traced(request, monkeypatch):
    """Without a mesh JAX traces and differentiates what each platform computes, and compiles one of
    them. Models are computed without one in these rooms: they take the CPU's at once, as runs do,
    which have a mesh. In `core`, `nn` and `kernels` the compiler chooses."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    if room in COMPUTE_MODELS and "jax" in sys.modules:
        lax = sys.modules["jax"].lax
        monkeypatch.setattr(lax, "platform_dependent", branch_of_cpus)


def branch_of_cpus(*args, default, **branches):
    """`lax.platform_dependent` on CPUs."""
    return branches.get("cpu", default)(*args)


@pytest.fixture(autouse=True, scope="module")
def the_command_trains_on_one_device(request):
    """As on a user's CPU: a step over eight takes longer to compile. Rooms whose runs change hands,
    and tests that call `train` with devices, have all."""
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    if file.startswith(MANY_DEVICES) or "jax" not in sys.modules:
        yield
        return
    from lmwright.train import command

    train, one = command.train, sys.modules["jax"].devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "train", lambda run, *given, **k: train(run, *(given or [one]), **k))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real text, tokenizers and a small model; absent outside the team's machines."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: real data for development")
    return SHARED
