"""The stage runner: resumes after any kill, and writes the same bytes for any worker count."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lmwright.data.manifest import files_below, hash_file, read_manifest
from lmwright.data.progress import PlainProgress
from lmwright.data.stage import run_stage
from lmwright.errors import UserError


def write_numbers(part, tmp):
    """A part: {"index", "size", maybe "wait" (a path that must exist before it ends)}."""
    (tmp / "train").mkdir()
    numbers = np.random.default_rng(part["index"]).integers(0, 9, part["size"], dtype=np.int64)
    numbers.tofile(tmp / "train" / f"{part['index']:03d}.bin")
    log = Path(part["log"]) / f"{part['index']}.{os.getpid()}.{time.monotonic_ns()}"
    log.touch()
    if "fail" in part and part["fail"] == "user":
        raise UserError("part 2, field text: is not there; name another column.")
    if "fail" in part and part["fail"] == "disk":
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp / "x"))
    while "wait" in part and not Path(part["wait"]).exists():
        time.sleep(0.01)
    return {"train": {"tokens": numbers.sum(), "docs": 1}, "first": [int(numbers[0])]}


def finish_total(counts, tmp):
    (tmp / "total.txt").write_text(str(sum(c["train"]["tokens"] for c in counts)))
    return {"parts_seen": len(counts)}


def parts_for(log, count=5, **last):
    log.mkdir(exist_ok=True)
    parts = [{"index": i, "size": 100 + i, "log": str(log)} for i in range(count)]
    parts[2] |= last
    return parts


def run(folder, parts, workers=1, key="a", **options):
    fingerprint = {"key": key}
    return run_stage(
        "numbers", folder, parts, write_numbers, fingerprint=fingerprint, workers=workers, **options
    )


def contents(folder):
    return {
        str(p.relative_to(folder)): hash_file(p) for p in files_below(folder) if p.name != ".lock"
    }


def test_counts_files_and_facts(tmp_path):
    manifest = run(
        tmp_path / "s", parts_for(tmp_path / "log"), finish=finish_total, facts={"dtype": "int64"}
    )
    numbers = [np.random.default_rng(i).integers(0, 9, 100 + i) for i in range(5)]
    assert manifest.counts["train"] == {"tokens": sum(n.sum() for n in numbers), "docs": 5}
    assert manifest.counts["first"] == [n[0] for n in numbers]
    assert manifest.total("tokens") == sum(n.sum() for n in numbers)
    assert manifest.facts == {"dtype": "int64", "parts_seen": 5}
    assert set(manifest.files) == {f"train/{i:03d}.bin" for i in range(5)} | {"total.txt"}
    for name, entry in manifest.files.items():
        assert hash_file(tmp_path / "s" / name) == entry["xxh3_128"]
    assert read_manifest(tmp_path / "s") == manifest
    assert not (tmp_path / "s" / "tmp").exists()


def test_same_bytes_for_any_worker_count(tmp_path):
    run(tmp_path / "one", parts_for(tmp_path / "log"), workers=1)
    run(tmp_path / "three", parts_for(tmp_path / "log"), workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_nothing_to_do_then_redone_when_the_fingerprint_changes(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "s"
    first = run(folder, parts_for(log))
    assert run(folder, parts_for(log)) == first and len(list(log.iterdir())) == 5
    run(folder, parts_for(log, count=4), key="b")
    assert len(list(log.iterdir())) == 9
    assert not (folder / "train" / "004.bin").exists()


def test_lost_or_cut_file_is_made_again(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "s"
    run(folder, parts_for(log))
    before = contents(folder)
    (folder / "train" / "001.bin").unlink()
    os.truncate(folder / "train" / "003.bin", 8)
    run(folder, parts_for(log))
    assert contents(folder) == before
    assert sorted(p.name[0] for p in log.iterdir()) == list("0112334")


def test_a_marker_that_names_files_elsewhere_is_not_believed(tmp_path):
    """Such a name would be removed, or sent to a bucket."""
    log, folder = tmp_path / "log", tmp_path / "s"
    run(folder, parts_for(log))
    before = contents(folder)
    (tmp_path / "mine.txt").write_text("mine")
    marker = folder / "parts" / "part-00001.json"
    body = json.loads(marker.read_text())
    body["files"]["../mine.txt"] = {"bytes": 4, "xxh3_128": "0"}
    marker.write_text(json.dumps(body))
    (folder / "manifest.json").unlink()
    run(folder, parts_for(log))
    assert contents(folder) == before and len(list(log.iterdir())) == 6


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "fail, says", [("user", "part 2, field text"), ("disk", "no space left on this disk")]
)
def test_failure_leaves_a_resumable_stage(tmp_path, workers, fail, says):
    log, folder = tmp_path / "log", tmp_path / "s"
    with pytest.raises(UserError, match=says):
        run(folder, parts_for(log, fail=fail), workers=workers)
    with pytest.raises(UserError, match="interrupted"):
        read_manifest(folder)
    for path in log.iterdir():
        path.unlink()
    done = {int(p.stem[-5:]) for p in (folder / "parts").glob("part-*.json")}
    run(folder, parts_for(log), workers=workers)
    assert {int(p.name[0]) for p in log.iterdir()} == set(range(5)) - done
    run(tmp_path / "whole", parts_for(log))
    assert contents(folder) == contents(tmp_path / "whole")


def test_nothing_of_a_writer_killed_before_its_rename_stays(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "s"
    folder.mkdir()
    (folder / ".stage.json.7").write_text("{")  # the very first write
    with pytest.raises(UserError, match="part 2"):
        run(folder, parts_for(log, fail="user"))
    (folder / "parts" / ".part-00003.json.8").write_text("{")
    (folder / ".manifest.json.9").write_text("{")
    run(folder, parts_for(log))
    run(tmp_path / "whole", parts_for(log))
    assert contents(folder) == contents(tmp_path / "whole")


SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.path.insert(0, {here!r})
import test_stage
if __name__ == "__main__":
    test_stage.run({folder!r}, json.loads({parts!r}), workers=2)
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_stage_resumes_with_the_same_bytes(tmp_path, sent):
    log, folder = tmp_path / "log", tmp_path / "s"
    parts = parts_for(log, wait=str(tmp_path / "never"))
    script = SCRIPT.format(
        here=str(Path(__file__).parent), folder=str(folder), parts=json.dumps(parts)
    )
    (tmp_path / "job.py").write_text(script)
    job = subprocess.Popen([sys.executable, tmp_path / "job.py"], stderr=subprocess.PIPE)
    markers = folder / "parts"
    wait_for(lambda: markers.exists() and len(list(markers.glob("part*.json"))) == 4)
    stuck = [int(p.name.split(".")[1]) for p in log.iterdir() if p.name[0] == "2"]
    job.send_signal(sent)
    said = job.communicate(timeout=60)[1]
    wait_for(lambda: gone(stuck[0]))  # no worker outlives its parent
    if sent == signal.SIGTERM:
        assert (job.returncode, said) == (143, b"")
    assert not (folder / "manifest.json").exists()
    (tmp_path / "never").touch()
    run(folder, parts, workers=1)
    assert sorted(p.name[0] for p in log.iterdir()) == list("012234")
    run(tmp_path / "whole", parts)
    assert contents(folder) == contents(tmp_path / "whole")


def test_second_process_is_kept_out(tmp_path):
    import fcntl

    folder = tmp_path / "s"
    folder.mkdir()
    with open(folder / ".lock", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            run(folder, parts_for(tmp_path / "log"))


def test_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        run(tmp_path / "s", parts_for(tmp_path / "log"))
    assert (tmp_path / "s" / "thesis.tex").read_text() == "mine"


def test_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "s").write_text("")
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "s", parts_for(tmp_path / "log"))
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "s" / "below", parts_for(tmp_path / "log"))


def test_read_only_folder(tmp_path, monkeypatch):
    parts = parts_for(tmp_path / "log")
    finished = run(tmp_path / "s", parts)

    # tests may run as root, for whom no folder is read-only: the refusal is simulated
    def refuse(path, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"new: cannot write here \(Read-only file system\)"):
        run(tmp_path / "new", parts)
    assert run(tmp_path / "s", parts) == finished


def test_plain_progress_lines(tmp_path, capsys):
    run(tmp_path / "s", parts_for(tmp_path / "log"), progress=PlainProgress())
    assert "numbers: 5 of 5 parts" in capsys.readouterr().err
    (tmp_path / "s" / "train" / "001.bin").unlink()
    run(tmp_path / "s", parts_for(tmp_path / "log"), progress=PlainProgress())
    assert "continues, 4 of 5 parts are done" in capsys.readouterr().err


def test_workers_import_no_jax():
    names = ("stage", "rows.pack", "rows.shuffle", "rows.loader")
    modules = ", ".join(f"lmwright.data.{name}" for name in names)
    code = f"import sys, {modules}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def count_one(part, tmp):
    return {"rows": 1}


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from lmwright.data import workers
from lmwright.data.stage import run_stage
from tests.data.test_stage import count_one

def ctrl_c():  # as a terminal sends it, while the workers start
    time.sleep({after})
    os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=ctrl_c, daemon=True).start()
    try:
        run_stage("s", Path({folder!r}), range(40), count_one, fingerprint={{}}, workers=2)
        time.sleep(9)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_while_workers_start_is_quiet(tmp_path):
    script = tmp_path / "main.py"
    for after in (0.02, 0.2):
        script.write_text(INTERRUPTED.format(after=after, folder=str(tmp_path / f"s{after}")))
        done = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        assert done.returncode == 130 and not done.stderr, done.stderr
