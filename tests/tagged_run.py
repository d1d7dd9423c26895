"""A run over tagged words, some of their texts longer than a row, whose data is prepared."""

from pathlib import Path

from lmwright.config.run import Run
from lmwright.objectives.tag import Tag
from tests.labeled_run import prepared_run

LABELS = ("O", "B-PET", "I-PET", "B-MAT")
PETS = ("cat", "d\u00f6g", "chow-chow")
ROWS = [
    {
        "tokens": ["the", "big", PETS[i % 3], f"{i},", *["on", "mats"] * (i % 9 * 2)],
        "tags": ["O", "B-PET", "I-PET", "O", *["O", "B-MAT"] * (i % 9 * 2)],
    }
    for i in range(60)
]  # fmt: skip


def tagged_run(root: Path, model, rows=ROWS, **source) -> Run:
    """A run over `ROWS` in `root`; nothing is trained, and the last ten are held out."""
    return prepared_run(root, model, Tag(labels=LABELS), rows, rows="tagged", **source)
