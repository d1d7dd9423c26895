"""Tests that need a card: `JAX_PLATFORMS=cuda,cpu python -m pytest -m slow tests/card`."""

import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several tests share the card


@pytest.fixture(autouse=True, scope="session")
def card():
    """The card; tests skip where JAX sees none."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.skip("needs a GPU, and JAX_PLATFORMS=cuda,cpu")
    return device
