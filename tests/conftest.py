"""Every test sees eight CPU devices; JAX reads the flag at its first import."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real text, tokenizers and a small model; absent outside the team's machines."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: real data for development")
    return SHARED
