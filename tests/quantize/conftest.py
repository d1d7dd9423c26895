"""Models that the tests of this folder quantize."""

import pytest

from lmwright.cli.main import main
from tests.train.texts import MODEL, PLAIN, STEADY, write_run, write_texts


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of the runs, their text and its prepared form."""
    folder = tmp_path_factory.mktemp("quantize")
    write_texts(folder / "text.jsonl")
    return folder


def trained(folder, name, model, top="", steps=4):
    """Run directory of a run of a few steps."""
    (folder / name).mkdir()
    path = write_run(
        folder / name, model, top=top, data=folder / "data", train=PLAIN,
        source=f'sources = [{{path = "{folder}/text.jsonl"}}]', more=STEADY.format(rate=1e-2),
    )  # fmt: skip
    assert main(["prepare", path]) == main(["train", path, f"train.steps={steps}"]) == 0
    return folder / name / "run"


@pytest.fixture(scope="session")
def run(folder):
    """Run directory of a llama."""
    return trained(folder, "plain", MODEL.format(kind="llama"))
