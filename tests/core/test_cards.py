"""NVIDIA cards that JAX cannot use, or that are full: one sentence with the cure, exit code 2.

There is no card here: what JAX says was read off its own plugin (0.10.2) on a host without one, and
`nvidia-smi` is a script.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lmwright.cli import main as cli
from lmwright.core import cards
from lmwright.errors import UserError
from lmwright.hardware import driver, environment

NVRM = "NVRM version: NVIDIA UNIX "
KERNEL = NVRM + "x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  11.4.0\n"
OPEN_KERNEL = NVRM + "Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@u22)\n"
NO_DRIVER = (
    "jaxlib/cuda/versions_helpers.cc:135: operation cuInit(0) failed: Unknown CUDA error 303; "
    "cuGetErrorName failed. This probably means that JAX was unable to load the CUDA libraries."
)
ADVICE = (
    " (you may need to uninstall the failing plugin package, or set JAX_PLATFORMS=cpu to skip this "
    "backend.)"
)
BACKEND = "Unable to initialize backend 'cuda': {}" + ADVICE
H100 = "NVIDIA H100 80GB HBM3"
ASKED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this a machine with these: the driver's version, CUDA of the plugin, memory in MiB."""

    def make(version="", plugin=None, memory=None, card=True):
        module, node = tmp_path / "version", tmp_path / "nvidia0"
        if version:
            module.write_text(KERNEL.format(version))
        if card:
            node.touch()
        monkeypatch.setattr(driver, "KERNEL_MODULE", module)
        monkeypatch.setattr(driver, "CARDS", (str(node),))
        monkeypatch.setattr(driver, "find_spec", lambda name: name == f"jax_cuda{plugin}_plugin")
        monkeypatch.setattr(driver, "heard", [])
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '{memory}'\n")
        smi.chmod(0o755 if memory else 0o644)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


@pytest.mark.parametrize("text", [KERNEL, OPEN_KERNEL])
def test_version_of_the_driver(monkeypatch, tmp_path, text):
    path = tmp_path / "version"
    path.write_text(text.format("580.65.06"))
    monkeypatch.setattr(driver, "KERNEL_MODULE", path)
    assert driver.version() == "580.65.06"


@pytest.mark.parametrize(
    "facts, cause, words",
    [
        (
            dict(version="535.104.05", plugin=13),
            "CUDA driver version is insufficient for CUDA runtime version",
            "its driver 535.104.05 is older than 580, which the extra cuda13 needs; update the "
            "driver, or run `pip install -e '.[cuda12]'`",
        ),
        (
            dict(version="470.57.02", plugin=12),
            "",
            "its driver 470.57.02 is older than 525, which the extra cuda12 needs; update the "
            "driver; JAX_PLATFORMS=cpu",
        ),
        (dict(plugin=12), NO_DRIVER, "driver is missing or does not answer (JAX says: operation"),
        (dict(version="580.65.06", plugin=13), "FAILED_PRECONDITION: No visible GPU devices.",
         "its driver 580.65.06 does not answer (JAX says: FAILED_PRECONDITION: No visible GPU dev"),
        (dict(version="580.65.06", plugin=13), "Unable to load cuFFT. Is it installed?",
         "CUDA are missing or old (Unable to load cuFFT); run `pip install -e '.[cuda13]'`"),
        (dict(version="550.54.14"), "", "plugin is not installed; run `pip install -e '.[cuda12]"),
        (dict(version="580.65.06"), "", "plugin is not installed; run `pip install -e '.[cuda13]"),
        (dict(version="580.65.06", plugin=13, memory="81559, 310"),
         "INTERNAL: CUDA error: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
         "too little of its memory is left (0.3 GiB of 79.6 GiB are free)"),
        (dict(plugin=13, card=False), "", "JAX finds no NVIDIA card on this machine"),
        (dict(card=False), "", "JAX finds no NVIDIA card on this machine"),
    ],
    ids=["old for 13", "old for 12", "no driver", "no device", "no library", "no plugin, old",
         "no plugin", "full", "no card", "neither"],
)  # fmt: skip
def test_reasons_why_jax_has_no_card(machine, facts, cause, words):
    machine(**facts)
    told = str(driver.refusal(RuntimeError(BACKEND.format(cause))))
    assert words in told
    assert "\n" not in told and ".cc:" not in told and told.count("JAX_PLATFORMS") == 1


UNKNOWN = "Unable to initialize backend '{}': Backend '{}' is not in the list of known backends"


@pytest.mark.parametrize("asked, name", [("foo", "foo"), ("cpu,foo", "foo"), ("gpu", "rocm")])
def test_a_platform_that_jax_does_not_know(machine, monkeypatch, asked, name):
    machine(card=False)
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    told = str(cli.of_card(RuntimeError(UNKNOWN.format(name, name))))
    named = "gpu" if asked == "gpu" else name
    assert told == (
        f"JAX_PLATFORMS={asked}: JAX finds no platform {named!r} on this machine; set "
        "JAX_PLATFORMS=cpu, or leave it out"
    )
    machine()
    told = str(cli.of_card(RuntimeError(UNKNOWN.format(name, name))))
    assert ("plugin is not installed" in told) == (asked == "gpu")


@pytest.mark.parametrize("there", [True, False])
def test_a_tpu_that_is_in_use_is_no_mistake_in_a_variable(monkeypatch, tmp_path, there):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setattr(environment, "TPUS", (str(tmp_path if there else tmp_path / "none"),))
    error = RuntimeError("Unable to initialize backend 'tpu': ABORTED: in use by another process")
    assert (environment.no_platform(error) is None) == there


def test_a_command_on_a_platform_that_is_not_there(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "foo", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"XDG_CACHE_HOME": str(tmp_path)}
    code = (
        "import sys\nfrom lmwright.cli import main\n"
        "import jax\nmain.lmwright.main = lambda **_: jax.devices()\nsys.exit(main.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("lmwright: error: JAX_PLATFORMS=foo: JAX finds no platform 'foo'")


def test_errors_of_others_are_left_alone():
    assert driver.refusal(RuntimeError("Unable to initialize backend 'tpu': no")) is None
    assert driver.refusal(AssertionError()) is None
    assert cards.out_of_memory(RuntimeError(ASKED)) is None
    assert cards.out_of_memory(jax.errors.JaxRuntimeError(ASKED)) is None  # of a CPU


PLUGIN = f"""
def initialize():
    raise RuntimeError({NO_DRIVER!r})
"""
CHECK = """
import sys
from lmwright.hardware import driver, environment
driver.CARDS = (sys.argv[1],)
from lmwright.core.cards import refuse_lost_card
from lmwright.errors import UserError
try:
    refuse_lost_card()
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("card", [True, False])
def test_a_plugin_that_fails_in_jax_itself(tmp_path, card):
    """JAX would log a traceback and go on with the CPU: refused where there is a card, noted where
    there is none."""
    for name, text in (("jax_plugins/xla_cuda13", PLUGIN), ("jax_cuda13_plugin", "")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(text)
    env = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, "-c", CHECK, str(Path(__file__) if card else tmp_path / "none")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == card
    if card:
        assert line.startswith("JAX cannot use this machine's NVIDIA card: its driver")
        assert "(JAX says: operation cuInit(0) failed" in line
    else:
        assert line.startswith("note: computing on the CPU: JAX's CUDA plugin finds no NVIDIA card")


def test_a_platform_that_was_asked_for_and_is_not_there():
    """JAX_PLATFORMS=cuda ends in an assertion of JAX."""
    env = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHECK, str(Path(__file__))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    there = driver.cuda_of_plugin() is not None
    cause = "parts of CUDA are missing" if there else "its CUDA plugin is not installed"
    assert cause in done.stderr and "run `pip install -e '.[cuda13]'`" in done.stderr


GIB = 2**30


@pytest.mark.parametrize(
    "text, stats, memory, words",
    [
        (
            ASKED,
            {"bytes_in_use": 50 * GIB, "bytes_limit": 59.5 * GIB, "pool_bytes": 59.5 * GIB},
            "81559, 18000",
            ["12884901888 bytes more were asked for", "JAX uses 50.0 GiB of the 59.5 GiB",
             "17.6 GiB of the card's 79.6 GiB are free", "train.remat=block",
             "`lmwright plan RUN --on gpu:h100x1`", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"],
        ),
        (
            "RESOURCE_EXHAUSTED: Failed to allocate request for 3.00GiB (3221225472B) on device "
            "ordinal 0",
            {"bytes_in_use": 2 * GIB, "bytes_limit": 59.5 * GIB, "pool_bytes": 4 * GIB},
            "81559, 1000",
            ["3.00GiB more were asked for", "1.0 GiB of the card's 79.6 GiB are free",
             "other processes hold about 74.7 GiB: end them (nvidia-smi lists them)"],
        ),
        (
            "FAILED_PRECONDITION: DNN library initialization failed.",
            {"bytes_in_use": GIB, "bytes_limit": 59.5 * GIB},
            "81559, 18000",
            ["cuDNN and cuBLAS need some", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.6"],
        ),
        (ASKED, {}, None, ["out of memory on", "train.remat=block"]),
    ],
    ids=["too much", "others", "libraries", "nothing known"],
)  # fmt: skip
def test_a_full_card(machine, monkeypatch, text, stats, memory, words):
    machine("580.65.06", 13, memory)
    card = SimpleNamespace(platform="gpu", device_kind=H100, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    told = str(cards.out_of_memory(jax.errors.JaxRuntimeError(text)))
    assert [part for part in words if part not in told] == []
    assert told.startswith(f"out of memory on {H100}") and "\n" not in told


def test_generation_has_other_cures(machine, monkeypatch):
    machine("580.65.06", 13, "81559, 1000")
    card = SimpleNamespace(platform="gpu", device_kind=H100, memory_stats=dict)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    told = str(cli.of_card(jax.errors.JaxRuntimeError(ASKED)))
    assert told.startswith("out of memory on") and "train." not in told


def test_a_kernel_that_asks_for_too_much_is_no_full_card(monkeypatch):
    """Its own error says which; less to train would not help."""
    card = SimpleNamespace(platform="gpu", device_kind=H100, memory_stats=dict)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    text = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 110592, available: 1"
    assert cards.out_of_memory(jax.errors.JaxRuntimeError(text)) is None


def test_train_tells_of_a_full_card_in_one_line(machine, monkeypatch, capsys, tmp_path):
    machine("580.65.06", 13, "81559, 1000")
    card = SimpleNamespace(platform="gpu", device_kind=H100, memory_stats=dict)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])

    def full(*_args, **_options):
        raise jax.errors.JaxRuntimeError(ASKED)

    monkeypatch.setattr("lmwright.train.command.train", full)
    monkeypatch.setattr("lmwright.data.missing.prepare_missing", lambda run: False)
    run = tmp_path / "run.toml"
    run.write_text('recipe = "quickstart"\nname = "a"\ndir = "a"\n[data]\ndir = "data"\n')
    assert cli.main(["train", str(run)]) == UserError.exit_code
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"lmwright: error: out of memory on {H100}: 12884901888 bytes more")
    assert "\n" not in said
