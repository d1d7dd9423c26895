"""A tagger from a run to transformers."""

import numpy as np
import pytest

from lmwright.data.tokens.tags import words_as_tokens
from lmwright.errors import UserError
from lmwright.evals.entities import entity_counts, f1_of
from lmwright.evals.held_out import eval_command, open_held_out
from lmwright.evals.predict import predict_command
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


def test_eval_scores_the_held_out_words(run, capsys):
    """Against the export in transformers, of each held-out text by itself."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    real, given = _by_transformers(torch, transformers, run)
    assert loss.tokens == sum(map(len, real))
    right = sum(a == b for x, y in zip(real, given, strict=True) for a, b in zip(x, y, strict=True))
    assert loss.accuracy == pytest.approx(right / loss.tokens)
    assert loss.entity_f1 == pytest.approx(f1_of(entity_counts(real, given)))
    assert eval_command(run.dir, precision="fp32") == 0
    assert "entity F1" in capsys.readouterr().out


def _by_transformers(torch, transformers, run):
    """(tags, the tags given) of the words of each held-out text, by the export."""
    out = f"{run.dir}-exported"
    export_command(run.dir, out)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    tokenizer, real, given = load_model(out).tokenizer, [], []
    after = [tokenizer.eos_id] if run.data.tokenize.append == "eos" else []
    for row in ROWS[-10:]:
        found = words_as_tokens(tokenizer, row["tokens"], SEQ_LEN - len(after))
        with torch.no_grad():
            ids = torch.tensor([[*found.ids.tolist(), *after]])
            scores = theirs(input_ids=ids).logits[0].numpy()
        given.append([LABELS[i] for i in scores[found.first].argmax(-1)])
        real.append([row["tags"][i] for i in found.word])
    return real, given


def test_predict_refuses_it(exported, tmp_path):
    (tmp_path / "texts.txt").write_text("the cat\n")
    with pytest.raises(UserError, match="tags words, which predict does not write"):
        predict_command(str(exported[0]), str(tmp_path / "texts.txt"))
