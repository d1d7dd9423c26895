"""A classifier of real paragraphs, by the book that they are from, after minutes on a CPU."""

import csv
import re

import pytest
import tomli_w

from lmwright.data.prepare import prepare_command
from lmwright.evals.classes import Scores
from lmwright.evals.held_out import open_held_out
from lmwright.formats.open import load_run
from lmwright.train.session import train

pytestmark = pytest.mark.slow
WORDS = 25


def write_paragraphs(books, path):
    """csv of texts of at least WORDS words, each the beginning of a paragraph, and their book;
    returns the books."""
    names = []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for book in sorted(books.glob("*.txt")):
            names.append(book.stem)
            for paragraph in re.split(r"\n\s*\n", book.read_text("utf-8")):
                words = paragraph.split()
                if len(words) >= WORDS and not paragraph.startswith("#"):
                    writer.writerow([" ".join(words[: 2 * WORDS]), book.stem])
    return names


def fields(folder, name, **said):
    return {
        "name": name,
        "dir": str(folder / name),
        "metrics": {"trackers": []},
        **said,
    }


def trained(folder, said):
    path = folder / f"{said['name']}.toml"
    path.write_text(tomli_w.dumps(said))
    run = load_run(path)
    prepare_command(run)
    train(run)
    return run


OWN = {"eurobert": {"num_kv_heads": 4}, "modernbert": {"num_kv_heads": 4, "window": 17}}


@pytest.mark.parametrize("kind", OWN)
def test_books_are_told_apart(kind, shared_data, tmp_path):
    books = shared_data / "text/books_txt"
    names = write_paragraphs(books, tmp_path / "paragraphs.csv")
    small = {"precision": "fp32", "global_batch_size": 16}
    encoder = fields(
        tmp_path, "encoder", recipe="pretrain-encoder",
        model={
            "kind": kind, "vocab_size": 4096, "embed_dim": 128, "mlp_dim": 384,
            "num_layers": 3, "num_heads": 4, "head_dim": 32, "seq_len": 128, **OWN[kind],
        },
        data={
            "dir": str(tmp_path / "text"),
            "sources": [{"path": str(books), "documents": "paragraph"}],
        },
        train={**small, "steps": 400, "remat": "none"},
        optim={"learning_rate": 2e-3, "schedule": {"kind": "cosine", "warmup_steps": 40}},
        eval={"every_steps": 400},
    )  # fmt: skip
    trained(tmp_path, encoder)
    classes = fields(
        tmp_path, "books", recipe="finetune-classifier",
        objective={"labels": names},
        data={
            "dir": str(tmp_path / "labeled"),
            "sources": [{"path": str(tmp_path / "paragraphs.csv"), "rows": "labeled"}],
        },
        train={**small, "epochs": 6.0, "init_from": str(tmp_path / "encoder")},
        optim={"learning_rate": 5e-4},
    )  # fmt: skip
    run = trained(tmp_path, classes)
    opened = open_held_out(run.dir)
    (loss,) = opened.held_out.losses(opened.weights)
    scores = Scores.of(loss.confusion)
    print(loss.tokens, scores)
    assert scores.accuracy > scores.majority + 0.3
    assert scores.matthews > 0.5
