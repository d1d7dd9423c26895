"""What an installation resolves to: alone for the CPU, with cuda12 and cuda13 for NVIDIA GPUs.

pip downloads up to 3 GB to read what packages need, and installs nothing.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.style.sources import ROOT

pytestmark = pytest.mark.slow
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")


@pytest.fixture(scope="module")
def registry():
    """Skips where no registry of packages can be reached."""
    done = subprocess.run([*PIP, "--no-deps", "--timeout=10", "--retries=1", "tomli-w"])
    if done.returncode:
        pytest.skip("no registry of packages can be reached")


def resolved(wanted, report):
    """Version of each package that pip would install, in a folder that has none."""
    env = os.environ | {"PIP_CONSTRAINT": ""}
    command = [*PIP, "--only-binary=:all:", "--no-cache-dir", f"--report={report}", wanted]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {package["name"].lower(): package["version"] for package in found}


@pytest.mark.parametrize("cuda", [None, 12, 13])
def test_an_installation_resolves(registry, tmp_path, cuda):
    """One version of JAX, its plugin and its libraries of that CUDA; nothing of it for the CPU."""
    found = resolved(f".[cuda{cuda}]" if cuda else ".", tmp_path / "report.json")
    card = {name for name in found if name.startswith(("nvidia-", "jax-"))}
    assert "lmwright" in found and found["jax"] == found["jaxlib"]
    if cuda is None:
        assert not card
        return
    parts = {f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"}
    assert {found[name] for name in parts} == {found["jax"]}
    assert f"nvidia-cudnn-cu{cuda}" in card
    assert not {
        name for name in card if name.endswith(f"cu{25 - cuda}") or f"cuda{25 - cuda}" in name
    }
