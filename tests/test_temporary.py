"""Temporary folders of killed processes go with the next one; all others stay."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lmwright.guard.temporary import temporary_folder

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
