"""A tagger from a run to transformers."""

import json
import shutil

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.data.tokens.tags import words_as_tokens
from lmwright.evals.entities import entity_counts, f1_of
from lmwright.evals.held_out import eval_command, open_held_out
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.models.eurobert import EuroBert
from lmwright.models.tagger import Tagger
from tests.labeled_run import SEQ_LEN, SIZES
from tests.saved_run import save_run
from tests.tagged_run import LABELS, ROWS, tagged_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights."""
    run = tagged_run(tmp_path_factory.mktemp("tags"), EuroBert(mlp_dim=24, **SIZES))
    save_run(run, steps=(1,), std=0.3)  # larger ones saturate attention, and rounding grows
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, export_command(run.dir, out)


def test_the_export_opens_in_transformers(exported):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    out, proof = exported
    there = proof.folder_to_transformers
    assert there.max_abs_diff <= 1e-5 * there.max_abs_logit
    assert proof.source_to_folder.max_abs_diff == 0
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out)
    assert tuple(theirs.config.id2label[i] for i in range(len(LABELS))) == LABELS
    pipe = transformers.pipeline("token-classification", model=str(out), device="cpu")
    found = pipe(" ".join(ROWS[1]["tokens"]))
    assert all(each["entity"] in LABELS and np.isfinite(each["score"]) for each in found)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card
    assert 'pipeline("token-classification"' in card


def test_the_export_is_read_again(run, exported):
    out, _ = exported
    loaded = load_model(str(out))
    assert isinstance(loaded.model, Tagger) and loaded.model.labels == LABELS


def test_eval_scores_the_held_out_words(run, by_transformers, capsys):
    """Against the export in transformers, of each held-out text by itself."""
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    real, given, _ = by_transformers
    assert loss.tokens == sum(map(len, real))
    right = sum(a == b for x, y in zip(real, given, strict=True) for a, b in zip(x, y, strict=True))
    assert loss.accuracy == pytest.approx(right / loss.tokens)
    assert loss.entity_f1 == pytest.approx(f1_of(entity_counts(real, given)))
    assert eval_command(run.dir, precision="fp32") == 0
    assert "entity F1" in capsys.readouterr().out


@pytest.fixture(scope="module")
def by_transformers(run, exported):
    """(tags, the tags given, their probabilities) of the words of each held-out text, by the
    export."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    out, _ = exported
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    tokenizer, real, given, shares = load_model(str(out)).tokenizer, [], [], []
    after = [tokenizer.eos_id] if run.data.tokenize.append == "eos" else []
    for row in ROWS[-10:]:
        found = words_as_tokens(tokenizer, row["tokens"], SEQ_LEN - len(after))
        with torch.no_grad():
            ids = torch.tensor([[*found.ids.tolist(), *after]])
            scores = theirs(input_ids=ids).logits[0].softmax(-1).numpy()[found.first]
        given.append([LABELS[i] for i in scores.argmax(-1)])
        shares.append(scores.max(-1))
        real.append([row["tags"][i] for i in found.word])
    return real, given, shares


def test_predict_gives_each_word_its_tag(run, exported, by_transformers, tmp_path, capsys):
    """From the run and from its export, whose tags are those that transformers gives; the words
    that do not fit have none."""
    _, given, shares = by_transformers
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(" ".join(row["tokens"]) + "\n" for row in ROWS[-10:]))
    for model in (run.dir, str(exported[0])):
        out = tmp_path / "tags.jsonl"
        words = [model, str(texts), "--out", str(out), "--overwrite", "--precision", "fp32"]
        assert main(["predict", *words]) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["words"] for line in lines] == [row["tokens"] for row in ROWS[-10:]]
        left_out = 0
        for line, tags, probabilities in zip(lines, given, shares, strict=True):
            there = [tag for tag in line["tags"] if tag is not None]
            assert there == tags
            scores = [score for score in line["scores"] if score is not None]
            np.testing.assert_allclose(scores, probabilities, rtol=1e-4)
            assert len(line["tags"]) == len(line["words"]) == len(line["scores"])
            assert line.get("cut", False) == (None in line["tags"])
            left_out += line["tags"].count(None)
        assert left_out > 0
        assert f", {left_out:,} without a tag" in capsys.readouterr().out


def test_predict_cuts_at_the_side_of_the_tokenizer_s_file(exported, tmp_path):
    """Where it names the left one, the last words are kept."""
    folder, words = tmp_path / "left", [f"cat{i}" for i in range(SEQ_LEN)]
    shutil.copytree(exported[0], folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"truncation_side": "left"}))

    (tmp_path / "text.txt").write_text(" ".join(words) + "\n")
    paths = [str(folder), str(tmp_path / "text.txt"), "--out", str(tmp_path / "tags.jsonl")]
    assert main(["predict", *paths, "--precision", "fp32"]) == 0
    line = json.loads((tmp_path / "tags.jsonl").read_text())
    left_out = line["tags"].count(None)
    assert line["cut"] and 0 < left_out < len(words) and None not in line["tags"][left_out:]
    tokenizer = load_model(str(folder)).tokenizer
    every = tokenizer.plain.encode(" ".join(words), add_special_tokens=False).ids
    kept = words_as_tokens(tokenizer, words, SEQ_LEN - 1, side="left")
    assert kept.word.tolist() == [*range(left_out, len(words))]
    assert kept.ids.tolist() == every[-len(kept.ids) :] and len(kept.ids) < SEQ_LEN
    assert tokenizer.decode(kept.ids.tolist()).split() == words[left_out:]


@pytest.mark.parametrize("text", ["", "  ", "one"])
def test_predict_of_hardly_any_words(text, exported, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert main(["predict", str(exported[0]), str(tmp_path / "texts.jsonl")]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()
               if line.startswith("{")]  # fmt: skip
    assert line.get("words", text.split()) == text.split()
    assert len(line.get("tags", ())) == len(text.split())


@pytest.mark.parametrize(
    "option, said", [("--pair-column", "a tagger reads one"), ("--label-column", "lmwright eval")]
)
def test_predict_of_tags_refuses_columns(option, said, exported, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "the cat", "other": "B-PET"}\n')
    words = [str(exported[0]), str(tmp_path / "texts.jsonl"), option, "other"]
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
