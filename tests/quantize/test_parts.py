"""An interrupted quantize goes on where it was, to the same bits, and what it keeps is let go."""

import errno
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lmwright.cli.main import main
from lmwright.formats.load import load_model
from lmwright.guard.files import try_lock
from lmwright.quantize import layers, parts
from tests.quantize.conftest import trained

FEW = ["--rows", "4", "--context", "16"]
RECURRENT = """
kind = "xlstm"
vocab_size = 320
embed_dim = 64
mlp_dim = 96
num_layers = 2
num_heads = 2
key_dim = 16
head_dim = 32
seq_len = 48
"""


@pytest.fixture(scope="module")
def runs(run, folder):
    """Run directories by kind: one that goes layer after layer, and one that does not."""
    return {"llama": run, "xlstm": trained(folder, "recurrent", RECURRENT)}


def stopped_after(count, error, monkeypatch):
    """Lets that many weights be kept, and fails then; returns those that are asked to be kept."""
    asked, put = [], parts.Parts.put

    def limited(self, path, layer, arrays):
        asked.append((path, layer))
        if len(asked) > count:
            raise error
        put(self, path, layer, arrays)

    monkeypatch.setattr(parts.Parts, "put", limited)
    return asked


@pytest.mark.parametrize("kind", ["llama", "xlstm"])
def test_an_interrupted_command_goes_on(kind, runs, tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole", tmp_path / "m"
    command = ["quantize", str(runs[kind]), str(out), "--to", "int8", *FEW]
    with monkeypatch.context() as patch:
        first = stopped_after(3, KeyboardInterrupt(), patch)
        assert main(command) == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert not out.exists() and len(list((tmp_path / "m.part").glob("*.safetensors"))) == 3
    with monkeypatch.context() as patch:
        rest = stopped_after(10**9, None, patch)
        assert main(command) == 0
    assert "quantize: goes on, 3 of" in capsys.readouterr().err
    assert not set(first[:3]) & set(rest)
    assert main(["quantize", str(runs[kind]), str(whole), "--to", "int8", *FEW]) == 0
    for name, array in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(load_file(out / "model.safetensors")[name], array, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "whole"]


def test_a_killed_process_leaves_whole_weights(run, tmp_path):
    out = tmp_path / "m.gguf"
    command = ["quantize", str(run), str(out), *FEW]
    killed = subprocess.Popen([sys.executable, "-m", "lmwright", *command])
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("m.gguf.part/*.safetensors"))) < 2 and killed.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert main(command) == 0
    assert main(["quantize", str(run), str(tmp_path / "whole.gguf"), *FEW]) == 0
    first, second = (load_model(tmp_path / name).weights for name in ("m.gguf", "whole.gguf"))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert not list(tmp_path.glob("*.part"))


def test_parts_of_another_command_are_not_taken(run, tmp_path, monkeypatch, capsys):
    command = ["quantize", str(run), str(tmp_path / "m"), "--group-size", "16", *FEW]
    with monkeypatch.context() as patch:
        stopped_after(2, KeyboardInterrupt(), patch)
        assert main(command) == 130
    other = [*command[:4], "32", *FEW]
    capsys.readouterr()
    assert main(other) == 2
    told = capsys.readouterr().err
    assert "m.part: holds finished layers, made with other settings (group_size); give" in told
    assert main([*other, "--overwrite"]) == 0 and not (tmp_path / "m.part").exists()


def test_a_second_command_waits_for_none(run, tmp_path, capsys):
    (tmp_path / "m.part").mkdir()
    with open(tmp_path / "m.part" / parts.LOCK, "a") as lock:
        assert try_lock(lock)
        assert main(["quantize", str(run), str(tmp_path / "m"), "--group-size", "16", *FEW]) == 2
    assert "m.part: is being written by another command; wait for it" in capsys.readouterr().err


def test_a_full_disk_is_told_and_nothing_is_lost(run, tmp_path, monkeypatch, capsys):
    write, command = parts.write_whole, ["quantize", str(run), str(tmp_path / "m.gguf"), *FEW]
    kept = []

    def until_full(path, content):
        if path.name.endswith(parts.ENDING) and len(kept) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)
        kept.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_whole", until_full)
        assert main(command) == 2
    told = capsys.readouterr().err
    assert "m.gguf.part: cannot be written (No space left on device); free some space" in told
    assert main(command) == 0 and "goes on, 2 of" in capsys.readouterr().err


def test_a_layer_is_in_memory_at_a_time(run, tmp_path, monkeypatch):
    """Of the run's 80,000 weights."""
    model, most = load_model(run).model, []

    def counted(array, sharding):
        most.append(array.size)
        return jax.device_put(array)

    monkeypatch.setattr(layers, "on_devices", counted)
    monkeypatch.setattr(layers, "from_hf", None)
    assert main(["quantize", str(run), str(tmp_path / "m.gguf"), *FEW]) == 0
    assert max(most) == model.vocab_size * model.embed_dim  # the table


@pytest.mark.parametrize(
    "out, folder",
    [
        ("gs://bucket/a/m", "{cache}/lmwright/buckets/bucket/a/m.part"),
        ("a/m.gguf", "{here}/a/m.gguf.part"),
        (".", "{here}.part"),
    ],
)
def test_where_parts_are_kept(out, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    wanted = folder.format(cache=tmp_path / "cache", here=tmp_path)
    assert str(parts.folder_of(out)) == wanted
