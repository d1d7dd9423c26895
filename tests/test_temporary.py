"""Temporary folders of killed processes go with the next one; copies are whole or not there."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmwright.guard import folders
from lmwright.guard.files import write_whole
from lmwright.guard.folders import copy_folder
from lmwright.guard.temporary import temporary_file, temporary_folder
from lmwright.report.written import write_page

KILLED = """
import os, signal
from pathlib import Path
from lmwright.guard.temporary import temporary_folder
folder = temporary_folder()
Path(folder.name, "model.safetensors").write_bytes(bytes(1000))
print(folder.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", KILLED]
    killed = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
    left = Path(killed.stdout.strip())
    assert left.parent == tmp_path and (left / "model.safetensors").exists()
    own = temporary_folder()
    assert not left.exists()

    pid = left.name.split("-")[-2]
    (tmp_path / "target").mkdir()
    (tmp_path / left.name).symlink_to("target")
    others = [f"lmwright-elsewhere-0-{pid}-abcd", "lmwright-x", left.name.replace("lmw", "l")]
    for name in others:
        (tmp_path / name).mkdir()
    with temporary_folder() as second:
        kept = {own.name, second, *(str(tmp_path / n) for n in (*others, left.name, "target"))}
        assert {str(path) for path in tmp_path.iterdir()} == kept
    own.cleanup()


def test_files_of_killed_processes_go_with_the_next(tmp_path):
    code = KILLED.partition("folder = ")[0].replace("temporary_folder", "temporary_file")
    code += f"temporary_file(Path({str(tmp_path)!r}), 'a').touch()\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.Popen([sys.executable, "-c", code])
    killed.wait()
    (left,) = tmp_path.iterdir()
    earlier = [tmp_path / f".{name}.{killed.pid}.tmp" for name in ("new", "old")]
    for path in (*earlier, tmp_path / "a", tmp_path / ".b.1.tmp"):
        path.touch()
    os.utime(earlier[1], (0, 0))
    os.utime(tmp_path / ".b.1.tmp", (0, 0))  # of a process that runs
    own = temporary_file(tmp_path, "b")
    assert own.name.startswith(".b.") and own.parent == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {earlier[0].name, "a", ".b.1.tmp"}
    assert left.name.split(".")[1] == "a"


def test_a_page_removes_what_a_killed_one_left(tmp_path):
    """Nobody else writes beside a report or a plan of the user."""
    code = KILLED.partition("from pathlib")[0] + "from pathlib import Path\n"
    code += "from lmwright.report import written\nfrom lmwright.guard import files\n"
    code += "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"written.write_page('old', {str(tmp_path / 'a.html')!r})"
    subprocess.run([sys.executable, "-c", code])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    write_page("new", tmp_path / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert (tmp_path / "a.html").read_text() == "new"


def test_a_copied_folder_is_whole_or_not_there(tmp_path, monkeypatch):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "parts").mkdir(parents=True)
    for name in ("x", "parts/y"):
        (source / name).write_text(name)
    (source / "x").chmod(0o600)
    (tmp_path / ".b.tmp").mkdir()  # of a process that was killed
    (tmp_path / ".b.tmp" / "old").touch()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", full)
        with pytest.raises(OSError, match="No space left"):
            copy_folder(source, target)
    assert sorted(os.listdir(tmp_path)) == ["a"]
    copy_folder(source, target)
    copied = {path.relative_to(target).as_posix() for path in target.rglob("*")}
    assert copied == {"x", "parts", "parts/y"}
    assert (target / "x").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_of_two_that_copy_to_one_place_one_is_told(tmp_path, monkeypatch):
    """And neither takes away what the other has begun; what SIGTERM ends leaves nothing."""
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    (source / "x").write_text("x")
    sync = folders.sync

    def meanwhile(path):
        monkeypatch.setattr(folders, "sync", sync)
        code = "import sys; from lmwright.guard.folders import *\n"
        code += "copy_folder(*map(Path, sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", code, str(source), str(target)], check=True)

    monkeypatch.setattr(folders, "sync", meanwhile)
    with pytest.raises(FileExistsError):
        copy_folder(source, target)
    assert (target / "x").read_text() == "x" and sorted(os.listdir(tmp_path)) == ["a", "b"]
    monkeypatch.setattr(folders, "sync", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        copy_folder(source, tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("of", ["write", "open", "sync"])
def test_a_disk_that_is_full_while_a_folder_is_copied_is_told_by_its_name(
    of, tmp_path, monkeypatch
):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    (source / "x").write_text("x")

    def full(*paths):
        names = {"write": [str(paths[0]), None, str(paths[-1])], "open": [str(paths[-1])]}
        raise OSError(errno.ENOSPC, "No space left on device", *names.get(of, []))

    if of == "sync":
        monkeypatch.setattr(folders, "sync", full)
    else:
        monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError) as caught:
        copy_folder(source, target)
    assert (caught.value.filename2 or caught.value.filename) == str(
        target if of == "sync" else target / "x"
    )
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write, without a name

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / "run.toml", "text")
    assert caught.value.filename == str(tmp_path / "run.toml")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_by_the_name_of_the_file(tmp_path, monkeypatch):
    def refuse(path, flags, mode):
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / "run.toml", "text")
    assert caught.value.filename == str(tmp_path / "run.toml")
