"""`prepare` with its output in a bucket: a stage made anew is never mixed with the one before."""

from pathlib import Path

import pytest

from lmwright.data.carry import working_folder
from lmwright.data.dropped import drop
from lmwright.data.stage import run_stage
from lmwright.storage.bucket import Bucket

PARTS = 4


def make(config, url, stop_at=None):
    """Texts of the parts of a stage, whose sizes do not depend on the configuration."""

    def work(part, temp):
        if part == stop_at:
            raise KeyboardInterrupt
        (temp / f"part-{part}.bin").write_text(f"{part} of {config}")
        return {"rows": 1}

    with working_folder(url) as data:
        folder = Path(data, "pack")
        run_stage("pack", folder, range(PARTS), work, fingerprint={"is": config}, workers=1)
        return [(folder / f"part-{part}.bin").read_text() for part in range(PARTS)]


@pytest.mark.parametrize("goes_on", ["first", "third"])
def test_another_configuration_that_was_stopped_goes_on(url, tmp_path, monkeypatch, goes_on):
    """On the machine that has the files of the first configuration, or on a new one."""

    def on_machine(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    on_machine("first")
    assert make("A", url) == [f"{part} of A" for part in range(PARTS)]
    on_machine("second")
    with pytest.raises(KeyboardInterrupt):
        make("B", url, stop_at=2)
    assert "pack/manifest.json" not in Bucket(url).entries()
    on_machine(goes_on)
    assert make("B", url) == [f"{part} of B" for part in range(PARTS)]
    there = {name: Bucket(url).read(name)[0].decode() for name in Bucket(url).entries("pack")}
    texts = [text for name, text in sorted(there.items()) if name.endswith(".bin")]
    assert texts == [f"{part} of B" for part in range(PARTS)]


def test_what_was_not_sent_is_kept_only_for_the_same_configuration(url, tmp_path, monkeypatch):
    """A process that was killed before it sent anything of the second configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    with pytest.raises(KeyboardInterrupt):
        make("A", url, stop_at=2)
    with monkeypatch.context() as patch:
        patch.setattr("lmwright.data.carry._Carrier.send", lambda self: None)
        make("B", url)
    assert make("A", url) == [f"{part} of A" for part in range(PARTS)]


@pytest.mark.parametrize("lost", ["one file", "everything"])
def test_what_the_bucket_lost_is_sent_again(url, lost):
    """The machine that prepared still has it."""
    make("A", url)
    before = Bucket(url).entries()
    for name in before if lost == "everything" else ["pack/part-1.bin"]:
        Bucket(url).remove(name)
    assert make("A", url) == [f"{part} of A" for part in range(PARTS)]
    there = Bucket(url).entries()
    assert {n: e.crc32c for n, e in there.items()} == {n: e.crc32c for n, e in before.items()}


def test_what_was_dropped_elsewhere_is_not_sent_again(url, tmp_path, monkeypatch):
    """`--keep store` on another machine, while this one still has the files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    make("A", url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    with working_folder(url) as data:
        drop(Path(data, "pack"))
    left = set(Bucket(url).entries())
    assert not any(name.endswith(".bin") for name in left)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    with working_folder(url):
        pass
    assert set(Bucket(url).entries()) == left


def test_a_run_below_is_none_of_the_datas_files(url):
    """A deleted run does not come back, and one that trains is not touched."""
    make("A", url)
    run = Bucket(f"{url}/run")
    for name in ("run.toml", "metrics.jsonl", "checkpoints/3/state"):
        run.write(name, "of a run")
    with working_folder(url) as data:
        assert not Path(data, "run").exists()
    assert set(run.entries()) == {"run.toml", "metrics.jsonl", "checkpoints/3/state"}
    with working_folder(url) as data:
        Path(data, "run").mkdir()
        for name in ("run.toml", "metrics.jsonl"):
            Path(data, "run", name).write_text("of a run here")
    assert run.read("metrics.jsonl")[0] == b"of a run"
    for name in run.entries():
        run.remove(name)
    with working_folder(url):
        pass
    assert not run.entries()
