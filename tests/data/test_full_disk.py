"""A disk that fills in any stage: one line, exit code 2, and the same bytes once there is room."""

import gc
import io
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.user_run import command, texts, write_run

FILE = {
    "tokenize": "data/tokenize/train/words/part-00000.tokens.bin",
    "pack": "data/pack/train/words/shard-00000.bin",
    "shuffle": "data/shuffle/epoch-00000/shard-00000.bin",
}
WRITTEN = "data.shuffle.order=written"


@pytest.fixture
def inside(tmp_path, monkeypatch):
    write_run(tmp_path, count=200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file_limit():
    """Sets how long a file may become; the system then refuses the write as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("stage", FILE)
def test_a_file_that_cannot_be_written_whole(stage, inside, capsys, file_limit):
    assert command(capsys, "prepare", "run.toml", WRITTEN)[0] == 0
    whole = Path(FILE[stage]).read_bytes()
    Path(FILE[stage]).unlink()
    file_limit(len(whole) // 2)
    code, said = command(capsys, "prepare", "run.toml", WRITTEN)
    file_limit(resource.RLIM_INFINITY)
    error = said.splitlines()[-1]
    assert code == 2 and f"data/{stage}: no space left on this disk" in error
    assert not Path(FILE[stage]).exists() and not list(Path("data", stage).glob("tmp/*"))
    assert command(capsys, "prepare", "run.toml", WRITTEN)[0] == 0
    assert Path(FILE[stage]).read_bytes() == whole


COLLECTED = """
import gc
from pathlib import Path
import numpy as np
from lmwright.data.manifest import save_array

for _ in range(50):
    try:
        save_array(Path("/dev/full"), np.zeros(1000))
    except OSError as error:
        error.itself = error
    gc.collect()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_array_that_cannot_be_written_leaves_nothing_that_crashes_the_collector():
    """Python 3.12.1 did, of a view of an io.BytesIO in a cycle."""
    assert subprocess.run([sys.executable, "-c", COLLECTED]).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a folder with room for so many KiB."""
    made = []

    def make(name, kib):
        folder = tmp_path / name
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        made.append(folder)
        return folder

    yield make
    gc.collect()  # the traceback of an error may be part of a cycle and hold a file open
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kib", [60, 100, 140, 180, 220])
def test_a_full_disk_at_any_time(kib, inside, capsys, small_disk):
    folder = small_disk("small", kib)
    code, said = command(capsys, "prepare", "run.toml", WRITTEN, f"data.dir={folder}")
    assert code == 2 and f"{folder}/" in said and "no space left on this disk" in said
    subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
    assert command(capsys, "prepare", "run.toml", WRITTEN, f"data.dir={folder}")[0] == 0
    assert command(capsys, "data", "verify", str(folder))[0] == 0
    assert command(capsys, "prepare", "run.toml", WRITTEN)[0] == 0
    for name in FILE.values():
        assert (folder / Path(name).relative_to("data")).read_bytes() == Path(name).read_bytes()


def test_no_room_to_unpack_a_parquet_file_is_not_blamed_on_it(
    inside, capsys, file_limit, monkeypatch
):
    raw = io.BytesIO()
    pq.write_table(pa.table({"text": texts(2000)}), raw, compression="none")
    Path("words.parquet.zst").write_bytes(zstandard.compress(raw.getvalue()))
    Path("run.toml").write_text(Path("run.toml").read_text().replace(".jsonl", ".parquet.zst"))
    Path("unpacked").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(Path("unpacked").absolute()))
    file_limit(50_000)
    code, said = command(capsys, "prepare", "run.toml")
    file_limit(resource.RLIM_INFINITY)
    assert code == 2 and "set TMPDIR to a folder with more space" in said
    assert "damaged" not in said
    assert command(capsys, "prepare", "run.toml")[0] == 0
