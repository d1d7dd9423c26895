"""Files of vectors that are made of lines, also by commands that are killed."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from lmwright.data.sources.columns import Row
from lmwright.errors import UserError
from lmwright.evals import embed as embed_module
from lmwright.evals import streamed, vectors
from lmwright.evals.embed import Vectors, prompt_of
from lmwright.evals.streamed import open_texts, write_lines
from lmwright.evals.vectors import finisher, line_of

WORDS = [f"word {number}" for number in range(5)]
FORMS = [".npy", ".npz", ".parquet"]


class Killed(BaseException):
    """The end of a process: nothing is tidied up."""


class Count:
    """A tally that counts nothing."""

    def add(self, made):
        pass


@pytest.fixture(params=FORMS)
def embed(tmp_path, request):
    """Writes the vectors of some texts to a file of a format; returns its path."""
    (tmp_path / "in.txt").write_text("\n".join(WORDS) + "\n")
    out = tmp_path / f"out{request.param}"

    def lines(rows):
        for row in rows:
            made = {"row": row.number, "id": row.id}
            yield [line_of(made, np.full(3, row.number, np.float32), request.param)]

    def run(asked="a", overwrite=False):
        texts, finish = open_texts(str(tmp_path / "in.txt"), "text", None), finisher(out.suffix, "")
        end = lambda part, place: finish(3, part, place)  # noqa: E731
        write_lines(texts, lines, Count(), out, {"asked": asked}, end, overwrite)
        return out

    return run


def killed_after_naming(monkeypatch, embed):
    """Ends a command when OUT has just taken its name; returns OUT."""

    def at_once(path, **_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", at_once)
        patch.setattr(streamed.Path, "unlink", lambda path, missing_ok=False: at_once(path))
        with pytest.raises(Killed):
            embed()


def test_the_lines_of_a_killed_command_go_once_their_file_has_its_name(
    embed, tmp_path, monkeypatch
):
    killed_after_naming(monkeypatch, embed)
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 4 and left[-1].endswith(".part.json")
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        embed()
    assert len(os.listdir(tmp_path)) == 2
    before = (tmp_path / left[1]).read_bytes()
    assert embed(overwrite=True).read_bytes() == before or left[1].endswith(".npz")
    assert len(os.listdir(tmp_path)) == 2


def test_lines_beside_a_file_that_is_not_made_of_them_stay(embed, tmp_path, monkeypatch):
    killed_after_naming(monkeypatch, embed)
    out = next(path for path in tmp_path.iterdir() if path.stem == "out" and path.suffix in FORMS)
    out.write_bytes(b"another's")
    part = out.with_name(f"{out.name}.part")
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        embed()
    assert len(part.read_text().splitlines()) == len(WORDS)
    out.unlink()
    embed()
    assert sorted(os.listdir(tmp_path)) == ["in.txt", out.name]


def test_a_file_of_the_user_with_a_similar_name_stays(embed, tmp_path):
    names = [tmp_path / f"out{form}.tmp" for form in FORMS]
    for name in names:
        name.write_text("mine")
    embed()
    assert [name.read_text() for name in names] == ["mine"] * 3


def test_a_file_that_a_killed_command_had_begun_is_removed(embed, tmp_path):
    (tmp_path / ".out.npy.part.4711.tmp").write_text("half")
    (tmp_path / ".out.npz.part.4711.tmp").write_text("half")
    (tmp_path / ".out.parquet.part.4711.tmp").write_text("half")
    out = embed()
    assert not (tmp_path / f".{out.name}.part.4711.tmp").exists()
    assert json.dumps(sorted(os.listdir(tmp_path))).count("4711") == 2


@pytest.mark.parametrize("form", [".jsonl", *FORMS])
def test_files_hold_vectors_ids_and_places_of_rows_without_a_text(form, tmp_path, monkeypatch):
    """Over several blocks of lines, the last one of which is short."""
    monkeypatch.setattr(vectors, "BLOCK", 3)
    wanted = np.random.default_rng(0).standard_normal((8, 5)).astype("f4")
    rows = [{"row": number, "id": f"t\u00e9xt {number}"} for number in range(2, 10)]
    rows[4] = {"row": 6, "error": "the line is blank"}  # and no id
    part, out = tmp_path / "out.part", tmp_path / f"out{form}"
    lines = [line_of(row, None if "error" in row else vector, form)
             for row, vector in zip(rows, wanted, strict=True)]  # fmt: skip
    part.write_text("".join(lines), encoding="utf-8")
    finisher(form, str(out))(5, part, out)
    wanted[4] = np.nan
    if form == ".jsonl":
        back = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        assert [{k: v for k, v in line.items() if k != "embedding"} for line in back] == rows
        found = [line.get("embedding", [np.nan] * 5) for line in back]
    elif form == ".parquet":
        table = pq.read_table(out).to_pydict()
        assert table["row"] == [*range(2, 10)] and table["id"] == [row.get("id") for row in rows]
        assert table["error"] == [row.get("error") for row in rows]
        assert [each is None for each in table["embedding"]] == [i == 4 for i in range(8)]
        found = [[np.nan] * 5 if each is None else each for each in table["embedding"]]
    elif form == ".npz":
        arrays = np.load(out)
        assert arrays["ids"].tolist() == [row.get("id", "") for row in rows]
        found = arrays["embeddings"]
    else:
        found = np.load(out)
    np.testing.assert_array_equal(np.float32(found), wanted)


@pytest.mark.parametrize("length", ["one", "any"])
def test_the_first_numbers_are_kept_and_then_scaled(length, monkeypatch):
    whole = np.random.default_rng(0).standard_normal((4, 6))
    monkeypatch.setattr(embed_module, "of_documents", lambda *_: whole.copy())
    some = object.__new__(Vectors)
    some.model = SimpleNamespace(embed_dim=6, length=length)
    some.dim, some.most, some._run = 4, 9, None
    wanted = whole[:, :4]
    if length == "one":
        wanted = wanted / np.sqrt((wanted**2).sum(1, keepdims=True))
    found = some.of([[1]] * 4)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found.dtype == np.float32


def test_the_prompt_that_is_put_before_texts():
    """The one that is named, else the model's default one, else none."""
    there = {"query": "ask: ", "passage": "read: "}
    model = SimpleNamespace(prompts=tuple(there.items()), default_prompt="passage")
    assert prompt_of(model, None, "m") == "read: " and prompt_of(model, "query", "m") == "ask: "
    assert prompt_of(SimpleNamespace(prompts=model.prompts, default_prompt=None), None, "m") == ""
    with pytest.raises(UserError, match="m has no prompt 'title'; choose 'query' or 'passage'"):
        prompt_of(model, "title", "m")
    seen = []
    some = SimpleNamespace(
        prompt="ask: ", chunk=2, of=lambda documents: np.zeros((len(documents), 2), "f4"),
        encode=lambda texts: (seen.extend(texts) or texts, [False] * len(texts)),
    )  # fmt: skip
    rows = iter([Row(i, f"text {i}", f"{i}", "{}") for i in range(3)])
    assert len(list(embed_module.embed_lines(some, rows, embed_module.VectorTally(), ".npy"))) == 2
    assert seen == ["ask: text 0", "ask: text 1", "ask: text 2"]
