"""The page on embeddings: its run file and its commands, as printed, on a small encoder; the export
gives the same vectors in sentence-transformers."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.models.modernbert import ModernBert
from tests.page_folder import write_encoder, write_run_file

PAGE = Path(__file__).resolve().parents[1] / "docs/embeddings.md"
# The page starts from a model of the hub; its lines stay as they are but for these words behind.
SHORTER = (
    "train.init_from=encoder", "train.global_batch_size=16", "train.precision=fp32",
    "optim.learning_rate=1e-2", "data.pack.seq_len=64", "data.workers=1", "metrics.trackers=[]",
    "train.epochs=12", "train.num_microbatches=2",
)  # fmt: skip
PLACES = [f"{a}{b}" for a in ("north", "south", "east", "west", "upper") for b in
          ("ville", "ham", "burg", "stead", "ford", "ton", "bridge", "well")]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an encoder, questions and their answers, texts, and run.toml."""
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "questions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        for i in range(400):
            place = PLACES[i % len(PLACES)]
            writer.writerow([f"how far is {place} from {i}?", f"{i * i} miles to {place}"])
    texts = [{"text": f"{i} miles to {place}"} for i, place in enumerate(PLACES)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    model = ModernBert(
        vocab_size=300, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=8, seq_len=64, window=9,
    )  # fmt: skip
    write_encoder(model, 64, path="questions.csv", text_column="question")
    write_run_file(PAGE)
    return tmp_path


@pytest.mark.slow
def test_the_page_runs_as_printed(folder, capsys):
    lines = re.findall(r"^    (lmwright .+)$", PAGE.read_text("utf-8"), re.M)
    verbs = []
    for line in lines[:5]:
        _, *words = shlex.split(line)
        verbs.append(words[0])
        words += SHORTER if "run.toml" in words else ()
        words += ("--precision", "fp32") if verbs[-1] == "embed" else ()
        assert main(words) == 0
    assert verbs == ["prepare", "train", "eval", "embed", "export"]
    said = capsys.readouterr().out
    assert main(["report", "runs/search"]) == 0
    page = Path("runs/search/report.html").read_text("utf-8")
    assert "accuracy at 1, " in page and "mrr at 10, " in page
    assert re.search(r"a step of 16 rows compares about \d\d with each other", said)
    assert re.search(r"^questions +1\d +", said, re.M) and "MRR at 10" in said
    lines = [json.loads(line) for line in (folder / "runs/search/metrics.jsonl").open()]
    first, *_, last = [line for line in lines if line["kind"] == "eval"]
    assert first["step"] == 0 and last["accuracy_at_1"] > first["accuracy_at_1"]
    assert last["mrr_at_10"] > first["mrr_at_10"] + 0.1 and last["loss"] < first["loss"] / 2
    same_vectors(folder)
    two = ["lora.kind=lora", "lora.adapters=[{name='a'}, {name='b'}]", "dir=other"]
    assert main(["train", "run.toml", *SHORTER, *two]) == 2
    assert "'embed' compares all texts of a batch" in capsys.readouterr().err
    card = (folder / "my-embedder/README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card and "SentenceTransformer(" in card


def same_vectors(folder):
    """Vectors of the run, of its export, and of sentence-transformers, are the same."""
    with np.load(folder / "vectors.npz") as arrays:
        ours = arrays["embeddings"]
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)
    ask = ["embed", "my-embedder", "texts.jsonl", "--out", "v.npy", "--precision", "fp32"]
    assert main(ask) == 0
    np.testing.assert_allclose(np.load(folder / "v.npy"), ours, atol=1e-5)
    theirs = pytest.importorskip("sentence_transformers")
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    model = theirs.SentenceTransformer(str(folder / "my-embedder"), device="cpu")
    assert model.max_seq_length == 64 and model.similarity_fn_name == "cosine"
    np.testing.assert_allclose(model.encode(texts), ours, atol=1e-5)
