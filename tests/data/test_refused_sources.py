"""Sources that cannot give what a run asks of them: one sentence with the field and the cause."""

import json
import os
from pathlib import Path

import pytest

from tests.data.user_run import command, write_run


def refused(tmp_path, capsys, source, *more, verb="prepare"):
    """What a command says of a source of `a.txt` and the like, which it refuses."""
    write_run(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    path = "" if "path" in source else f'path = "{tmp_path}/a.txt", '
    override = f"data.sources=[{{{path}{source}}}]"
    dirs = (f"dir={tmp_path}/run", f"data.dir={tmp_path}/data")
    code, said = command(capsys, verb, str(tmp_path / "run.toml"), *dirs, override, *more)
    assert code == 2
    return " ".join(said.split())


@pytest.mark.parametrize(
    "field", ['text_column = "content"', 'id_column = "url"', 'meta_columns = ["date"]']
)
def test_columns_of_plain_text_have_no_effect(tmp_path, capsys, field):
    name = field.split()[0]
    said = refused(tmp_path, capsys, field)
    assert f"data.sources.{name}: has no effect on {tmp_path}/a.txt, which is plain text" in said


def test_plain_text_holds_no_conversations(tmp_path, capsys):
    said = refused(tmp_path, capsys, 'rows = "messages"', "data.chat.template=chatml",
                   "data.pack.method=best-fit", "objective.kind=sft")  # fmt: skip
    assert 'a.txt is plain text, and rows = "messages" needs columns' in said


def test_each_reason_is_told_once(tmp_path, capsys):
    rows = ["{", "{", "{", json.dumps({"text": 3}), *[json.dumps({"text": "a"})] * 9]
    (tmp_path / "b.jsonl").write_text("\n".join(rows) + "\n")
    said = refused(tmp_path, capsys, f'path = "{tmp_path}/b.jsonl"')
    assert said.count("invalid JSON") == 1 and "b.jsonl:1 invalid JSON" in said
    assert "b.jsonl:4 'text' is a number, not text; correct the input" in said


def test_a_server_that_does_not_answer_is_told_from_a_missing_file(tmp_path, capsys):
    url = "http://127.0.0.1:9/x.jsonl"
    said = refused(tmp_path, capsys, f'path = "{url}"')
    assert f"{url} cannot be read: Cannot connect to host 127.0.0.1:9" in said


def test_a_file_where_the_folder_would_be_is_named(tmp_path, capsys):
    said = refused(tmp_path, capsys, 'name = "a"', f"data.dir={tmp_path}/a.txt")
    assert f"data.dir: {tmp_path}/a.txt is a file, not a folder" in said


def test_where_no_folder_can_be_made(tmp_path, capsys):
    if not Path("/proc/self").exists():
        pytest.skip("the system has no folders of its own")
    assert "data.dir: /proc/x" in refused(tmp_path, capsys, 'name = "a"', "data.dir=/proc/x")


def test_an_empty_path_is_not_the_current_folder(tmp_path, capsys):
    assert "data.sources.0.path: is empty" in refused(tmp_path, capsys, 'path = ""')


def test_the_home_of_nobody(tmp_path, capsys):
    said = refused(tmp_path, capsys, 'path = "~nobody-here/a.txt"')
    assert "data.sources: ~nobody-here/a.txt does not exist" in said


def test_a_link_to_nowhere_in_the_folder_s_place_is_named(tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    said = refused(tmp_path, capsys, 'name = "a"', f"data.dir={tmp_path}/link")
    assert f"data.dir: {tmp_path}/link is a link to nowhere" in said


def test_links_to_folders_are_told(tmp_path, capsys):
    write_run(tmp_path, path="corpus")
    for name in ("corpus", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("some text of words\n\n" * 50)
    (tmp_path / "corpus" / "more").symlink_to(tmp_path / "other")
    code, said = command(
        capsys, "prepare", str(tmp_path / "run.toml"), f"data.dir={tmp_path}/data",
        f'data.sources=[{{path = "{tmp_path}/corpus"}}]',
    )  # fmt: skip
    said = "".join(said.split())
    assert code == 0 and f"linkstofoldersarenotread:{tmp_path}/corpus/more;nameeachasa" in said


def test_a_pipe_is_not_said_to_be_missing(tmp_path, capsys):
    os.mkfifo(tmp_path / "texts.jsonl")
    said = refused(tmp_path, capsys, f'path = "{tmp_path}/texts.jsonl"')
    assert (
        "texts.jsonl is a pipe or a device, which cannot be read twice; save it as a file" in said
    )


def test_a_column_that_is_not_there_is_named_by_workers_too(tmp_path, capsys):
    """Its error holds the columns that are there, and comes from another process."""
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("text,date\na,b\n")
    sources = "}, {".join(f'path = "{tmp_path}/{n}.csv", text_column = "content"' for n in "ab")
    said = refused(tmp_path, capsys, sources, "data.workers=2")
    assert ".csv has no column 'content', only 'text', 'date'; change data.sources.text_c" in said
