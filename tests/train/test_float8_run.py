"""Training in 8-bit floats by the command line, and where it is refused."""

import json

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.leaves import Float8
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.program.float8_training import Float8Training, refuse_devices
from lmwright.program.trainee import training_of
from tests.planner.runs import run_of
from tests.train.texts import MODEL, PLAIN, STEADY, write_run, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts."""
    folder = tmp_path_factory.mktemp("float8")
    write_texts(folder / "text.jsonl")
    return folder


def write(folder, precision, kind="llama", top=""):
    return write_run(
        folder / precision, MODEL.format(kind=kind), data=f"{folder}/data", top=top,
        source=f'sources = [{{path = "{folder}/text.jsonl"}}]',
        train=PLAIN, more=STEADY.format(rate=1e-2),
    )  # fmt: skip


def losses(folder, precision):
    (folder / precision).mkdir()
    path = write(folder, precision)
    assert main(["prepare", path]) == 0
    assert main(["train", path, f"train.precision={precision}", "train.steps=8"]) == 0
    lines = map(json.loads, (folder / precision / "run/metrics.jsonl").read_text().splitlines())
    return np.array([line["loss"] for line in lines if line["kind"] == "train"])


@pytest.mark.slow  # tests/core/test_float8.py has the products
def test_losses_are_near_those_of_bf16(folder):
    """And not the same, so that the 8 bits are there."""
    narrow, wide = losses(folder, "fp8"), losses(folder, "bf16")
    assert len(narrow) == len(wide) == 8 and narrow[-1] < narrow[0] - 0.5
    np.testing.assert_allclose(narrow, wide, rtol=0.01)
    assert np.abs(narrow - wide).max() > 1e-5


def test_matrices_of_attention_and_mlps_are_narrow(tmp_path):
    run = run_of(tmp_path, "train.precision=fp8", "model.vocab_size=512", preset="moe-6m")
    training = training_of(run)
    assert isinstance(training, Float8Training)
    (trainee,) = training.trainees
    bound = dict(walk(training.bind({}, trainee.spec)))
    narrow = {path.rpartition(".")[2] for path, leaf in bound.items() if isinstance(leaf, Float8)}
    assert narrow and narrow <= {"q", "k", "v", "o", "gate", "up", "down"}
    assert not any("experts" in path for path, leaf in bound.items() if isinstance(leaf, Float8))


def test_devices_without_8_bit_floats_are_refused():
    told = "does not multiply 'fp8', which GPUs do from Ada"
    with pytest.raises(UserError, match=f"train.precision: NVIDIA A100-SXM4-80GB {told}"):
        refuse_devices("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
    with pytest.raises(UserError, match=f"train.precision: TPU v5p {told}"):
        refuse_devices("tpu", "TPU v5p")
    refuse_devices("gpu", "NVIDIA L4", (8, 9))
    refuse_devices("gpu", "NVIDIA B200", (10, 0))
    refuse_devices("cpu", "cpu")


@pytest.mark.parametrize(
    "change, told",
    [
        ('qat.weights = "q4_0"', r"train.precision: 'fp8' works only .* use 'bf16' with \[qat\]"),
        ("lora.rank = 2", r"train.precision: 'fp8' works only .* use 'bf16' with \[lora\]"),
    ],
)
def test_other_kinds_of_training_are_refused(change, told, folder, tmp_path):
    (tmp_path / "fp8").mkdir()
    with pytest.raises(UserError, match=told):
        load_run(write(tmp_path, "fp8", top=change), ("train.precision=fp8",))


def test_a_ternary_model_is_refused(tmp_path):
    run = run_of(tmp_path, "train.precision=fp8", preset="bitnet-500k")
    with pytest.raises(UserError, match=r"train\.precision: the 'bitnet' model has no matrices"):
        _ = training_of(run).trainees
