"""`lmwright doctor`: what is here, what could be installed, and what is wrong."""

import json
from importlib import metadata

import jax
import pytest

from lmwright.cli.main import main
from lmwright.hardware import driver
from lmwright.train import doctor


@pytest.fixture
def alone(monkeypatch):
    """A machine without a card and without a TPU."""
    monkeypatch.setattr(driver, "has_card", lambda: False)
    monkeypatch.setattr(doctor, "is_there", lambda patterns: False)


def test_what_is_here(alone, capsys, monkeypatch):
    monkeypatch.setenv("JAX_TEST_TOKEN", "jt-123")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] == jax.__version__ and found["problems"] == []
    assert found["device_count"] == jax.device_count() and found["disk_free_bytes"] > 0
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out and "8 x cpu" in out
    assert "jt-123" not in out and "cuda" not in out.partition("extras")[2]


def test_extras_are_those_of_the_package(alone):
    named = set(metadata.metadata("lmwright").get_all("Provides-Extra"))
    assert set(doctor.describe_machine()["extras"]) == named


def test_extras_that_are_not_installed(alone, capsys, monkeypatch):
    version = metadata.version

    def of_others(package):
        if package in ("gguf", "google-cloud-tpu"):
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(metadata, "version", of_others)
    extras = doctor.describe_machine()["extras"]
    assert not extras["gguf"] and not extras["cloud"] and not extras["cuda12"]
    assert main(["doctor"]) == 0
    assert "  for GGUF files: run `pip install -e '.[gguf]'`" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["card", "tpu", "disk", "jax"])
def test_what_is_wrong(alone, capsys, monkeypatch, wrong):
    told = {
        "card": "JAX cannot use this machine's NVIDIA card",
        "tpu": "a TPU is here and not used",
        "disk": "1 GiB is free",
        "jax": "Unable to initialize backend",
    }
    monkeypatch.setattr("lmwright.cli.main.set_environment", lambda: None)
    monkeypatch.delenv("JAX_PLATFORMS")
    if wrong == "card":
        monkeypatch.setattr(driver, "has_card", lambda: True)
    elif wrong == "tpu":
        monkeypatch.setattr(doctor, "is_there", lambda patterns: True)
    elif wrong == "disk":
        monkeypatch.setattr(doctor, "GIB", 2**60)
    else:
        monkeypatch.setattr(doctor, "describe_environment", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: " in out and told[wrong] in out.partition("PROBLEM: ")[2], out


def fails():
    raise RuntimeError("Unable to initialize backend 'tpu': the TPU is already in use")
