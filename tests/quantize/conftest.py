"""Models that the tests of this folder quantize."""

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from tests.saved_run import save_run
from tests.train.texts import MODEL, PLAIN, STEADY, write_run, write_texts


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of the runs, their text and its prepared form."""
    folder = tmp_path_factory.mktemp("quantize")
    write_texts(folder / "text.jsonl")
    return folder


def prepared(folder, name, model, top=""):
    """Path of a run file whose data is prepared."""
    (folder / name).mkdir()
    path = write_run(
        folder / name, model, top=top, data=folder / "data", train=PLAIN,
        source=f'sources = [{{path = "{folder}/text.jsonl"}}]', more=STEADY.format(rate=1e-2),
    )  # fmt: skip
    assert main(["prepare", path]) == 0
    return path


def trained(folder, name, model, steps=4):
    """Run directory of a run of a few steps."""
    assert main(["train", prepared(folder, name, model), f"train.steps={steps}"]) == 0
    return folder / name / "run"


def saved(folder, name, model, top=""):
    """Run directory of a run with a checkpoint, without training."""
    return save_run(load_run(prepared(folder, name, model, top)), steps=(1,))


@pytest.fixture(scope="session")
def run(folder):
    """Run directory of a llama."""
    return trained(folder, "plain", MODEL.format(kind="llama"))
