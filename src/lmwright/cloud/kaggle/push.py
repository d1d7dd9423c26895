"""Push: the folder of a kernel, as Kaggle's client takes it."""

import json
from pathlib import Path
from typing import Any

from lmwright.cloud.kaggle import kernel as kernel_script
from lmwright.cloud.kaggle.service import ACCELERATOR

SETTINGS_LINE = "SETTINGS: dict = {}\n"


def script(facts: dict[str, Any]) -> str:
    """The kernel's script with its settings."""
    text = Path(kernel_script.__file__).read_text(encoding="utf-8")
    assert text.count(SETTINGS_LINE) == 1
    return text.replace(SETTINGS_LINE, f"SETTINGS: dict = json.loads({json.dumps(facts)!r})\n")


def write_kernel(
    folder: Path, kernel: str, text: str, datasets: list[str], kernels: list[str]
) -> None:
    """Writes the folder that the client pushes. No Docker image is pinned: TPUs have their own."""
    metadata = {
        "id": kernel,
        "title": kernel.partition("/")[2],
        "code_file": "kernel.py",
        "language": "python",
        "kernel_type": "script",
        "is_private": True,
        "enable_internet": True,
        "machine_shape": ACCELERATOR,
        "dataset_sources": datasets,
        "kernel_sources": kernels,
        "competition_sources": [],
        "model_sources": [],
    }
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata, indent=1))
    (folder / "kernel.py").write_text(text, encoding="utf-8")
