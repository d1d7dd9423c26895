"""Distillation by the command line: a run with [qat] learns from its own start or from a folder,
resumes to the same bits, and evaluates and exports the student alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.checkpoint.saved import SavedStates
from lmwright.cli.main import main
from lmwright.cloud.target import weights_of
from lmwright.core.param import init_weights, walk
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.models.llama import Llama
from tests.in_memory import export_hf
from tests.train import texts
from tests.train.texts import PLAIN, STEADY, write_run, write_texts

SIZES = texts.MODEL.format(kind="llama").replace("embed_dim = 64", "embed_dim = {width}")
MODEL = Llama(
    vocab_size=320, embed_dim=32, mlp_dim=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, seq_len=48,
)  # fmt: skip
CLM = 'kind = "clm"'
OWN = 'qat.weights = "q4_0"'
LOW_RANK = OWN + '\nlora = {rank = 4, base = "fp32"}'


def write(folder, data, objective='kind = "distill"', top="", train="", width=32, tokenizer=""):
    folder.mkdir(exist_ok=True, parents=True)
    source = f'sources = [{{path = "{data}.jsonl"}}]\nholdout_fraction = 0.1\n{tokenizer}'
    return write_run(
        folder, SIZES.format(width=width), top=top, data=data, source=source, train=PLAIN + train,
        more=f"[objective]\n{objective}\n{STEADY.format(rate=1e-2)}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folder with prepared data, a model that students start from and a wider one, as folders of
    Hugging Face."""
    home = tmp_path_factory.mktemp("distill")
    write_texts(home / "first.jsonl")
    shutil.copy(home / "first.jsonl", home / "data.jsonl")
    assert main(["prepare", write(home / "first", home / "first", CLM)]) == 0
    tokenizer = home / "first" / "tokenizer"
    for name, width in (("start", 32), ("wide", 48)):
        model = replace(MODEL, embed_dim=width)
        w = init_weights(model.spec(), jax.random.key(width))
        w = jax.tree.map(lambda a: 3 * np.asarray(a), w)  # logits that are far from even
        export_hf(model, w, tokenizer, home / name)
    assert main(["prepare", write(home / "student", home / "data", CLM, train=start(home))]) == 0
    return home


def start(home):
    return f'init_from = "{home}/start"'


def metrics_of(folder, kind="train"):
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def student(home):
    """Folder of a run with [qat] that learned from its own start, in two sessions."""
    path = write(home / "qat", home / "data", top=OWN, train=start(home))
    assert main(["train", path, "train.steps=2"]) == main(["train", path]) == 0
    return home / "qat"


def test_a_run_resumes_to_the_same_bits_and_saves_no_teacher(student, home, tmp_path):
    path = write(tmp_path, home / "data", top=OWN, train=start(home))
    assert main(["train", path]) == 0
    both = [load_model(folder / "run").weights for folder in (student, tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    names = {path for path, _ in walk(SavedStates(student / "run").shapes(4))}
    assert names and not any("teacher" in name or "frozen" in name for name in names)


def test_it_begins_at_the_teacher_and_moves_to_it(student):
    lines = metrics_of(student)
    kl = [line["teacher_kl"] for line in lines]
    assert 0 < kl[0] < 0.2  # of rounding alone
    assert lines[0]["loss"] == pytest.approx(0.5 * (lines[0]["nll"] + kl[0]), rel=1e-5)
    assert metrics_of(student, "eval")[-1]["loss"] > 1  # of the text, not of the teacher


def test_the_student_is_evaluated_and_exported_without_the_teacher(student, home, tmp_path, capsys):
    folder = tmp_path / "moved"
    shutil.copytree(student / "run", folder)
    text = (folder / "run.toml").read_text().replace(f"{home}/start", "/nowhere/run")
    (folder / "run.toml").write_text(text)
    assert main(["eval", str(folder)]) == 0
    assert main(["export", str(folder), str(tmp_path / "m.gguf"), "--dtype", "q4_0"]) == 0
    trained, back = load_model(folder).weights, dict(walk(load_model(tmp_path / "m.gguf").weights))
    for path, leaf in walk(trained):
        if path != "embed":  # which is F16
            np.testing.assert_array_equal(np.asarray(back[path]), leaf)
    capsys.readouterr()
    assert main(["train", str(folder), "train.steps=5"]) == 2
    assert "train.init_from: /nowhere/run: is not there" in capsys.readouterr().err


def test_a_folder_teaches_a_smaller_student(home, tmp_path, capsys):
    """A run file that names the teacher takes its model from there, and holds its hash."""
    shutil.copytree(home / "wide", tmp_path / "wide")
    path = write(
        tmp_path, home / "data", f'kind = "distill"\nteacher = "{tmp_path}/wide"\nalpha = 1',
        tokenizer=f'tokenizer.path = "{home}/start"',
    )  # fmt: skip
    pieces = ["train.num_microbatches=2", "train.global_batch_size=16"]
    assert main(["train", path, *pieces, "train.steps=1"]) == 0
    run = load_run(tmp_path / "run")
    assert run.objective.teacher_model == replace(MODEL, embed_dim=48)
    assert ("objective.teacher", f"{tmp_path}/wide") in weights_of(run)  # that a slice must see
    (line,) = metrics_of(tmp_path)
    assert line["loss"] == pytest.approx(line["teacher_kl"]) and line["teacher_kl"] > 0.5
    file = tmp_path / "wide" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, file, {"format": "pt"})
    capsys.readouterr()
    assert main(["train", path, *pieces]) == 2
    assert "objective.teacher: has other weights than the teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_inside_the_rounding_learn_from_their_base(home, tmp_path):
    path = write(tmp_path, home / "data", top=LOW_RANK, train=start(home))
    assert main(["train", path, "train.steps=2"]) == 0
    lines = metrics_of(tmp_path)
    assert 0 < lines[0]["teacher_kl"] < 0.2
    assert main(["eval", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_several_adapters_learn_from_one_teacher(home, tmp_path):
    top = 'lora = {rank = 4, base = "int8", adapters = [{name = "a"}, {name = "b"}]}'
    path = write(
        tmp_path, home / "data", f'kind = "distill"\nteacher = "{home}/wide"', top, start(home)
    )
    assert main(["train", path, "train.steps=2", "train.global_batch_size=16"]) == 0
    first = metrics_of(tmp_path)[0]
    both = [first[f"teacher_kl/{name}"] for name in "ab"]
    assert min(both) > 0.5
    assert first["teacher_kl"] == pytest.approx(np.mean(both), rel=0.2)
    assert main(["eval", str(tmp_path / "run"), "--adapter", "b"]) == 0


def test_a_teacher_of_another_tokenizer_is_refused(home, tmp_path, capsys):
    shutil.copytree(home / "wide", tmp_path / "wide")
    file = tmp_path / "wide" / "tokenizer.json"
    said = json.loads(file.read_text())
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(said))
    path = write(
        tmp_path, home / "data", f'kind = "distill"\nteacher = "{tmp_path}/wide"',
        tokenizer=f'tokenizer.path = "{home}/start"',
    )  # fmt: skip
    assert main(["train", path]) == 2
    assert "wide uses another tokenizer than the data in" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "objective, top, told",
    [
        ('kind = "distill"', "", "objective.teacher: is missing; name a model"),
        ('kind = "distill"\nteacher = "none"', "", "objective.teacher: is missing; name a model"),
        ('kind = "distill"', OWN, "there is no train.init_from to learn from"),
        ('kind = "distill"\nteacher = "/nowhere/x"', "", "objective.teacher: /nowhere/x: is not"),
        ('kind = "distill"\nteacher = "{small}"', "", "predicts 64 tokens and the student 320"),
        ('kind = "distill"\nalpha = 0', OWN, "objective.alpha"),
    ],
)
def test_what_is_refused(objective, top, told, home, tmp_path, capsys):
    small = tmp_path / "small"
    small.mkdir()
    config = json.loads((home / "wide" / "config.json").read_text()) | {"vocab_size": 64}
    (small / "config.json").write_text(json.dumps(config))
    path = write(tmp_path, home / "data", objective.format(small=small), top)
    assert main(["train", path]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_example_is_planned_with_the_bytes_of_its_teacher(capsys):
    example = Path(__file__).parents[2] / "examples" / "qat-distill.toml"
    said = ["plan", str(example), "--on", "v5e-16", "--quick"]
    assert main(said) == 0
    distilled = capsys.readouterr().out
    assert main([*said, "objective.kind=clm"]) == 0
    alone = capsys.readouterr().out
    norms = 33 * 2048  # whole on each of 16 chips in float32, the rest in bf16
    size = ((1_235_814_400 - norms) * 2 / 16 + norms * 4) / 2**20
    assert f"{size:.2f} MiB  of the weights are the teacher's" in distilled
    assert "teacher" not in alone
