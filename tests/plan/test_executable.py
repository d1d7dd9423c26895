"""A compiled step is found again by another process, for the same program, devices and versions."""

import importlib.metadata
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.plan import executable
from lmwright.plan.cache import PACKAGES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def lowered_step(scale=2.0):
    """(lowered, devices, arguments) of a small step over eight devices; the state is donated."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    place = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))

    def step(state, x):
        return {"w": state["w"] - scale * x}, jnp.sum(state["w"] * x)

    arguments = (
        {"w": jax.device_put(np.arange(96, dtype=np.float32).reshape(8, 12), place)},
        jax.device_put(np.cos(np.arange(96, dtype=np.float32)).reshape(8, 12), place),
    )
    lowered = jax.jit(step, donate_argnums=0).lower(*arguments)
    return lowered, list(mesh.devices.flat), arguments


def keep(scale=2.0, options=None):
    lowered, devices, _ = lowered_step(scale)
    key = executable.key_of(lowered.as_text(), devices, options or {})
    assert executable.save(key, lowered.compile())
    return executable.folder() / key


def load_here(options=None):
    lowered, devices, arguments = lowered_step()
    compiled, by_plan = executable.load_or_compile(lowered, devices, options or {})
    state, total = compiled(*arguments)
    return by_plan, np.asarray(state["w"]).tobytes().hex(), float(total)


def test_another_process_runs_the_kept_step():
    keep()
    code = "import json, test_executable as t; print(json.dumps(t.load_here()))"
    paths = [os.path.dirname(__file__), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    by_plan, *there = json.loads(done.stdout.splitlines()[-1])
    executable.folder().rename(executable.folder().with_name("away"))
    by_compiler, *here = load_here()
    assert (by_plan, by_compiler) == (True, False)
    assert there == here


def test_another_program_option_or_version_is_another_entry(monkeypatch):
    keep(scale=3.0)
    assert not load_here()[0]
    keep()
    assert load_here()[0]
    assert not load_here({"xla_option": "true"})[0]
    version = importlib.metadata.version
    changed = lambda name: "9" if name in PACKAGES else version(name)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", changed)
    assert not load_here()[0]


def test_devices_elsewhere_on_the_torus_are_another_entry():
    class Device:
        id, device_kind, core_on_chip = 0, "TPU v4", 0

        def __init__(self, *coords):
            self.coords = coords

    keys = {executable.key_of("p", [Device(0, 0, z)], {}) for z in (0, 1)}
    assert len(keys | {executable.key_of("p", [Device(0, 0, 1)], {})}) == 2


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "others may write"])
def test_what_is_damaged_or_open_to_others_is_compiled(harm):
    path = keep()
    held = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(held[:-9])
    elif harm == "flip":
        held[len(held) // 2] ^= 1
        path.write_bytes(held)
    elif harm == "empty":
        path.write_bytes(b"")
    else:
        path.chmod(0o666)
    assert not load_here()[0]


def test_what_the_runtime_refuses_is_compiled():
    path = keep()
    packed = executable.zstandard.compress(b"no executable")
    path.write_bytes(executable.hashlib.sha256(packed).digest() + packed)
    assert not load_here()[0]


def test_the_oldest_entries_go(monkeypatch):
    monkeypatch.setattr(executable, "ENTRIES", 2)
    paths = [keep(scale) for scale in (2.0, 3.0, 4.0)]
    for age, path in enumerate(reversed(paths)):
        if path.exists():
            os.utime(path, (1e9 - age, 1e9 - age))
    keep(5.0)
    assert sum(path.exists() for path in paths) == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    tmp_path.joinpath("lmwright").write_text("in the way")
    lowered, *_ = lowered_step()
    assert not executable.save("0", lowered.compile())
    assert not load_here()[0]
