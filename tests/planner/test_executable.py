"""A compiled step is found again by another process, in another folder, for the same program,
devices and versions; where it is not, the difference is named."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

import lmwright
from lmwright.program import executable
from lmwright.program.cache import PACKAGES
from tests.planner.runs import run_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def compiled_here():
    """What the CPU's compiler made here: a program out of JAX's cache cannot be kept again. The
    process that keeps steps has that cache off."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


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
    ready = executable.load_or_compile(lowered, devices, options or {})
    state, total = ready.compiled(*arguments)
    return ready.by_plan, np.asarray(state["w"]).tobytes().hex(), float(total)


def test_another_process_runs_the_kept_step():
    keep()
    code = (
        "import json; from tests.planner.test_executable import load_here; "
        "print(json.dumps(load_here()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    by_plan, *there = json.loads(done.stdout.splitlines()[-1])
    executable.folder().rename(executable.folder().with_name("away"))
    by_compiler, *here = load_here()
    assert (by_plan, by_compiler) == (True, False)
    assert there == here


def test_a_kept_step_is_read_under_a_umask_that_lets_groups_write():
    before = os.umask(0o002)
    try:
        path = keep()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert executable.read_private(path)


KEYS = """
import jax, jax.numpy as jnp
from types import SimpleNamespace
from lmwright.kernels.tpu_row_attention import causal_attention
from lmwright.nn.attention import Scoring
from lmwright.program import cache, executable
from jax._src import tpu_custom_call

tpu_custom_call.get_ir_version = lambda ctx: {version}

def attend(q, k, ids):
    out = causal_attention(q, k, k, ids, Scoring({scale}, None, None))
    return out.astype(jnp.float32).sum()

q, k = (jax.ShapeDtypeStruct((2, 128, n, 64), jnp.bfloat16) for n in (4, 2))
ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
traced = jax.jit(jax.grad(attend)).trace(q, k, ids)
text = traced.lower(lowering_platforms=("tpu",)).as_text()
device = SimpleNamespace(id=0, device_kind="TPU v5 lite", coords=[0, 0, 0])
print(text.count("tpu_custom_call"), executable.__file__)
print(executable.key_of(text, [device], {{}}), cache.key_of(text, "v5e:1x1", {{}}))
"""


def kernel_keys(folder, scale=0.125, version=None):
    """(kernels in the program, file of the source, keys) of a step with Pallas TPU kernels, by
    a process whose lmwright is in `folder`; kernels in this version of their format."""
    others = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", KEYS.format(scale=scale, version=version)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *others])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels, file, *keys = done.stdout.split()
    return int(kernels), Path(file), keys


def test_the_same_source_in_another_folder_has_the_same_keys(tmp_path):
    here, copy = Path(lmwright.__file__).parent, tmp_path / "elsewhere" / "src"
    shutil.copytree(here, copy / "lmwright", ignore=shutil.ignore_patterns("__pycache__"))
    kernels, file, keys = kernel_keys(here.parent)
    # a TPU's own runtime may read another version of the format than plan writes
    other_kernels, other_file, other_keys = kernel_keys(copy, version=13)
    assert kernels == other_kernels >= 2 and not file.is_relative_to(copy)
    assert other_file.is_relative_to(copy)
    assert keys == other_keys
    assert kernel_keys(copy, scale=0.25)[2] != keys  # another number inside the kernel


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


@pytest.mark.parametrize("harm", ["open folder", "open parent", "link", "second name", "linked"])
def test_a_step_that_others_may_have_placed_is_compiled(harm, tmp_path):
    path = keep()
    elsewhere = tmp_path / "elsewhere"
    if harm == "open folder":
        path.parent.chmod(0o777)
    elif harm == "open parent":
        path.parent.parent.chmod(0o770)
    elif harm == "link":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    elif harm == "second name":
        os.link(path, elsewhere)
    else:
        path.parent.rename(elsewhere)
        path.parent.symlink_to(elsewhere)
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


def kept_for(there, here, text="", **changes):
    """What a process with the run `here` gets where plan kept a step of the run `there`, of
    which something is changed."""
    lowered, devices, _ = lowered_step()
    made = executable.made_of(lowered.as_text() + text, devices, {}, there)
    assert executable.save("0" * 32, lowered_step(3.0)[0].compile(), replace(made, **changes))
    return executable.load_or_compile(lowered, devices, {}, here)


@pytest.mark.parametrize(
    "overrides, changes, says",
    [
        ((), {"devices": [[0, "cpu", None, None]] * 4}, "for 4 x cpu, not 8 x cpu"),
        ((), {"options": {"xla_a": "true"}}, "other options of XLA: xla_a"),
        (("train.remat=dots",), {}, "for train.remat = dots, not block"),
        (("seed=7", "train.steps=900"), {}, "for seed = 7, not 0 and 1 more"),
        ((), {"source": "", "program": ""}, "another version of lmwright's source"),
        ((), {"run": "another run"}, ""),
        ((), {"devices": [[0, "TPU v4", [0, 0, 0], 0]] * 8}, ""),
    ],
)
def test_train_is_told_why_it_compiles_although_a_step_was_kept(tmp_path, overrides, changes, says):
    there, here = (run_of(tmp_path, "train.remat=block", *words) for words in (overrides, ()))
    ready = kept_for(there, here, "x" if overrides else "", **changes)
    assert not ready.by_plan
    assert ready.reason == "" if not says else ready.reason.startswith("the step that plan kept")
    assert says in ready.reason


def test_another_version_is_told(tmp_path):
    versions = {name: "9.9" for name in PACKAGES}
    assert "for jax 9.9, not " in kept_for(run := run_of(tmp_path), run, versions=versions).reason


def test_a_damaged_step_is_told():
    path = keep()
    path.write_bytes(path.read_bytes()[:-9])
    lowered, devices, _ = lowered_step()
    ready = executable.load_or_compile(lowered, devices, {})
    assert ready.reason == "the step that plan kept cannot be loaded: its file is damaged"
