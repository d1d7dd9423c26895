"""Files of vectors that are made of lines, by commands that are killed."""

import json
import os

import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.evals import streamed
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
