"""Lines that are written for the rows of a file, by commands that are stopped or damaged."""

import errno
import json
import os
import re
from dataclasses import replace

import pytest

from lmwright.config.run import Source
from lmwright.errors import UserError
from lmwright.evals import streamed
from lmwright.evals.streamed import Texts, new_file, open_texts, refuse_existing, write_lines
from lmwright.evals.vectors import finisher

WORDS = [f"word {number}" for number in range(9)]
WHOLE = [{"text": word} for word in WORDS]


class Tally:
    def __init__(self):
        self.made = []

    def add(self, made):
        self.made.append(made)


@pytest.fixture
def write(tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(WORDS) + "\n")

    def run(stop_at=None, beside=lambda: None, asked="a", path="in.txt", overwrite=False):
        texts = open_texts(str(tmp_path / path), "text", None)
        tally = Tally()

        def lines(rows):
            for number, row in enumerate(rows):
                if number == stop_at:
                    raise KeyboardInterrupt
                beside()
                made = {"text": row.text}
                tally.add(made)
                yield [json.dumps(made) + "\n"]

        write_lines(texts, lines, tally, tmp_path / "out", {"asked": asked}, overwrite=overwrite)
        return tally.made

    return run


def test_what_a_crash_has_left_of_a_line_is_written_again(write, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    part = tmp_path / "out.part"
    with part.open("r+b") as file:  # a block that never came to the disk
        file.seek(25)
        file.write(bytes(20))
    assert write() == WHOLE
    assert [json.loads(line) for line in (tmp_path / "out").open()] == WHOLE
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out"]


@pytest.mark.parametrize("form", [".jsonl", ".npy"])
def test_lines_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch, form):
    """Else a power loss leaves an empty file under it, and the file before is gone."""
    part, out = tmp_path / "part", tmp_path / f"out{form}"
    part.write_text('{"row": 1}\n')
    done, replace_file = [], os.replace

    def fsync(descriptor):
        done.append(os.fstat(descriptor).st_ino)

    def take_name(source, target):
        assert done == [os.stat(source).st_ino]
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", take_name)
    finisher(form, str(out))(3, part, out)
    assert done == [out.stat().st_ino, tmp_path.stat().st_ino] and not part.exists()


def test_progress_is_told(write, monkeypatch, capsys):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(streamed, "TELL_EVERY_S", 0.0)
    write()
    assert [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{rows} rows" for rows in range(5, 10)
    ]


@pytest.fixture
def refused(write, tmp_path, capsys):
    """Checks that a command is refused and leaves the lines alone, until it may overwrite them."""
    part = tmp_path / "out.part"

    def check(reason, **options):
        before = part.read_bytes()
        with pytest.raises(UserError) as error:
            write(**options)
        assert str(error.value) == (
            f"{part}: holds finished lines, {reason}; repeat the command that wrote them to "
            "continue, or add --overwrite to start again"
        )
        assert part.read_bytes() == before and before.count(b"\n") == 4
        made = write(**options, overwrite=True)
        assert f"out.part: begins again without its lines, {reason}\n" in capsys.readouterr().err
        return made

    return check


def test_lines_whose_note_is_damaged_are_not_thrown_away(write, refused, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    (tmp_path / "out.part.json").write_bytes(b"\xff\xff")
    reason = "whose settings are not known (out.part.json is missing or damaged)"
    assert refused(reason) == WHOLE


def test_lines_of_other_settings_are_not_thrown_away(write, refused):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4, asked="b")
    assert refused("made with other settings (asked)") == WHOLE


def test_half_a_line_of_other_settings_is_no_loss(write, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=0, asked="b")
    (tmp_path / "out.part").write_bytes(b'{"text": ')
    assert write() == WHOLE
    assert [json.loads(line) for line in (tmp_path / "out").open()] == WHOLE


@pytest.mark.parametrize("name", ["in.txt", "other.txt", "folder/in.txt"])
def test_texts_are_known_by_what_they_hold(write, tmp_path, name):
    """However they are dated and named."""
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    (tmp_path / "folder").mkdir()
    if name != "in.txt":
        (tmp_path / "in.txt").rename(tmp_path / name)
    os.utime(tmp_path / name, (1, 1))
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=2, path=name)
    assert (tmp_path / "out.part").read_text().count("\n") == 6
    assert write(path=name, overwrite=True) == WHOLE
    assert [json.loads(line) for line in (tmp_path / "out").open()] == WHOLE


def test_texts_that_changed_in_place_are_other_texts(write, refused, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    path = tmp_path / "in.txt"
    before = path.stat()
    path.write_text(path.read_text().replace("word 4", "WORD 4"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert refused("made with other settings (texts)")[4] == {"text": "WORD 4"}


def test_half_a_note_of_a_killed_command_is_removed(write, tmp_path):
    (tmp_path / ".out.part.json.4711.tmp").write_text('{"ask')
    (tmp_path / "out.part").touch()
    assert write() == WHOLE
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out"]


def test_a_note_beside_whole_lines_is_removed(write, tmp_path):
    """As a kill leaves it right after the lines took their name."""
    write()
    (tmp_path / "out.part.json").write_text("{}")
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        write()
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out"]


def test_the_note_of_lines_that_are_there_is_not_written_again(write, tmp_path):
    """Else a kill or a full disk at that moment gives all of them up."""
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    before = (tmp_path / "out.part.json").stat()
    with pytest.raises(KeyboardInterrupt):
        write(stop_at=4)
    after = (tmp_path / "out.part.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_second_command_does_not_write_into_the_same_file(write, tmp_path):
    def second():
        with pytest.raises(UserError, match="is being written by another command"):
            write()

    assert write(beside=second) == WHOLE
    assert [json.loads(line) for line in (tmp_path / "out").open()] == WHOLE


def test_no_credentials_of_a_url_are_stored(tmp_path):
    url = "https://me:pw@host/in.txt?version=3&token=abc"
    (tmp_path / "in.txt").write_text("a word\n")
    file = replace(open_texts(str(tmp_path / "in.txt"), "text", None).files[0], path=url)
    texts = Texts(Source(path=url), (file,))
    assert texts.stamps == [["https://host/in.txt?version=3", file.size, file.stamp]]


def test_what_another_command_made_meanwhile_is_not_replaced(write, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        write(beside=lambda: out.write_text("another's"))
    assert out.read_text() == "another's"
    assert [json.loads(line) for line in (tmp_path / "out.part").open()] == WHOLE


def test_lines_that_get_their_name_before_they_are_locked_stay(write, tmp_path, monkeypatch):
    def lock(_file):
        os.replace(tmp_path / "out.part", tmp_path / "out")
        (tmp_path / "out").write_text("another's")
        return True

    monkeypatch.setattr(streamed, "try_lock", lock)
    with pytest.raises(UserError, match="is being written by another command"):
        write()
    assert (tmp_path / "out").read_text() == "another's"


class Count:
    """A tally that counts nothing."""

    def add(self, made):
        pass


def lines(rows):
    for row in rows:
        if row.text == "bad":
            raise UserError("a bad row")
        yield [json.dumps({"row": row.number}) + "\n"]


@pytest.mark.parametrize(("texts", "left"), [(["bad"], 0), (["good", "bad"], 1)])
def test_a_refused_command_leaves_what_it_can_go_on_from(tmp_path, texts, left):
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="a bad row"):
        write_lines(open_texts(str(tmp_path / "a.txt"), "text", None), lines, Count(), out, {})
    part = tmp_path / "out.jsonl.part"
    assert not out.exists() and part.exists() == bool(left)
    assert (tmp_path / "out.jsonl.part.json").exists() == bool(left)
    assert not left or len(part.read_text().splitlines()) == left


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "No space left on device); free some space and run the same command again"),
        (errno.EROFS, "Read-only file system); choose another --out"),
    ],
)
def test_a_disk_that_takes_no_more_is_told_with_the_cure(tmp_path, number, cure):
    (tmp_path / "in.txt").write_text("good\n" * 2)

    def finish(part, out):
        raise OSError(number, os.strerror(number))

    texts, out = open_texts(str(tmp_path / "in.txt"), "text", None), tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=re.escape(cure)):
        write_lines(texts, lines, Count(), out, {}, finish)
    assert len((tmp_path / "out.jsonl.part").read_text().splitlines()) == 2
    write_lines(texts, lines, Count(), out, {})
    assert len(out.read_text().splitlines()) == 2


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    refuse_existing(tmp_path / "new.jsonl", overwrite=False)
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        refuse_existing(tmp_path, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UserError, match="pipe: is not a regular file, and would be replaced by one"
    ):
        refuse_existing(tmp_path / "pipe", overwrite=True)
    with pytest.raises(UserError, match="none is not a folder; make it"):
        refuse_existing(tmp_path / "none" / "out.jsonl", overwrite=False)
    with pytest.raises(UserError, match=r"gs://b/out.jsonl: cannot be written to; give a path"):
        new_file("gs://b/out.jsonl", overwrite=False)


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "in.txt").write_text("good\n")
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/out")
    texts = open_texts(str(tmp_path / "in.txt"), "text", None)
    for overwrite in (False, True):
        write_lines(texts, lines, Count(), tmp_path / "out", {}, overwrite=overwrite)
        assert (tmp_path / "out").is_symlink() and len((tmp_path / "disk/out").read_bytes())
    assert os.listdir(tmp_path / "disk") == ["out"]


def test_the_texts_are_not_replaced(tmp_path):
    (tmp_path / "in.txt").write_text("good\n")
    (tmp_path / "link.txt").symlink_to("in.txt")
    texts = open_texts(str(tmp_path / "link.txt"), "text", None)
    with pytest.raises(UserError, match="holds the texts, which would be lost"):
        write_lines(texts, lines, Count(), tmp_path / "in.txt", {})
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "link.txt"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.toml", r"a\.toml is of an unknown format \(\.toml\); supported are .* and \.zst$"),
        ("a.json", r"each also \.gz and \.zst$"),
        ("a.parquet", r"truncated or damaged .*; replace this parquet file$"),
    ],
)
def test_no_cure_is_a_field_of_a_run(tmp_path, name, says):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=says):
        texts = open_texts(str(tmp_path / name), "text", None)
        write_lines(texts, lines, Count(), tmp_path / "out", {})


def test_a_file_that_changes_while_it_is_read_makes_no_output(write, tmp_path):
    path = tmp_path / "in.txt"

    def grow():
        path.write_text("\n".join([*WORDS, "one more"]) + "\n")

    with pytest.raises(UserError, match=r"in\.txt changed while it was read; run again"):
        write(beside=grow)
    assert not (tmp_path / "out").exists()


def test_half_of_a_surrogate_pair_beside_a_text_is_a_bad_row(tmp_path):
    rows = ['{"text": "a", "pair": "\\ud83d"}', '{"text": "a", "pair": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    bad, good = open_texts(str(tmp_path / "a.jsonl"), "text", None, ("pair",)).rows()
    assert "surrogate pair" in bad.reason
    assert json.loads(good.meta) == {"pair": "\U0001f600"}


@pytest.mark.parametrize("name", ["text", "other", "id"])
def test_a_column_that_no_row_of_a_jsonl_file_has_is_refused(tmp_path, name):
    """As in files with a header: errors in all lines, or texts without their pairs, help nobody."""
    path = tmp_path / "in.jsonl"
    row = {"text": "a", "other": "b", "id": 1, "url": "c"}
    del row[name]
    path.write_text(f"{json.dumps(row)}\n" * 3)
    texts = open_texts(str(path), "text", "id", ("other",))
    with pytest.raises(UserError, match=f"none of the first 3 rows has '{name}'.*; change --"):
        write_lines(texts, lambda rows: ([] for _ in rows), Tally(), tmp_path / "out", {})
    assert os.listdir(tmp_path) == ["in.jsonl"]
    path.write_text("{broken\n" * 3)  # nobody knows what these have
    rows = list(open_texts(str(path), "text", "id", ("other",)).rows())
    assert len(rows) == 3 and all("invalid JSON" in row.reason for row in rows)
    path.write_text('{"text": "a"}\n{"other": 1, "text": null}\n{"other": 1, "text": "b"}\n')
    assert len(list(open_texts(str(path), "text", None, ("other",)).rows())) == 3
