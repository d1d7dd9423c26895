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
from lmwright.errors import UserError
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
    assert "quantize: continues, 3 of" in capsys.readouterr().err
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
    assert "m.part: holds finished layers, made with other settings (group_size); repeat" in told
    assert main([*other, "--overwrite"]) == 0 and not (tmp_path / "m.part").exists()


def test_a_damaged_part_is_made_again(run, tmp_path, monkeypatch, capsys):
    """A cut one, one with other bytes, and one that is empty."""
    whole, out = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    assert main(["quantize", str(run), str(whole), *FEW]) == 0
    command = ["quantize", str(run), str(out), *FEW]
    with monkeypatch.context() as patch:
        stopped_after(5, KeyboardInterrupt(), patch)
        assert main(command) == 130
    cut, other, empty = sorted((tmp_path / "m.gguf.part").glob("*.safetensors"))[:3]
    cut.write_bytes(cut.read_bytes()[:-9])
    other.write_bytes(other.read_bytes()[:-9] + bytes(9))
    empty.write_bytes(b"")
    capsys.readouterr()
    assert main(command) == 0
    told = capsys.readouterr().err
    for path in (cut, other, empty):
        assert f"{path}: is damaged, and made again" in told
    assert "quantize: continues, 2 of" in told
    first, second = (load_model(path).weights for path in (out, whole))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("note", ["", "[1]", None])
def test_parts_whose_note_is_damaged_are_not_thrown_away(note, tmp_path):
    folder, asked = tmp_path / "m.part", {"to": "int4"}
    with pytest.raises(KeyboardInterrupt), parts.kept_parts(folder, asked, False) as kept:
        kept.put("layers.q", 0, {"codes": np.zeros(3, np.int8)})
        raise KeyboardInterrupt
    (folder / parts.ASKED).unlink()
    if note is not None:
        (folder / parts.ASKED).write_text(note)
    reason = r"settings are not known \(asked\.json is missing or damaged\); repeat the command"
    with pytest.raises(UserError, match=reason), parts.kept_parts(folder, asked, False):
        pass
    assert kept.done == {("layers.q", 0)}
    with parts.kept_parts(folder, asked, True) as kept:
        assert not kept.done
    assert not folder.exists()


def test_parts_that_a_killed_command_was_removing_go_with_the_next(run, tmp_path, monkeypatch):
    command = ["quantize", str(run), str(tmp_path / "m.gguf"), *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(parts.Parts, "clear", lambda _: os.kill(os.getpid(), signal.SIGINT))
        assert main(command) == 130
    assert (tmp_path / "m.gguf").exists() and list(tmp_path.glob("*.part/*.safetensors"))
    assert main(command) == 2  # as the result exists
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_of_the_user_in_the_place_of_the_parts_stays(tmp_path):
    folder = tmp_path / "m.part"
    folder.mkdir()
    for name in ("mine.txt", "mine.safetensors"):
        (folder / name).write_text("mine")
        with pytest.raises(UserError, match=r"m\.part: .* holds something else; move it away"):
            with parts.kept_parts(folder, {}, True):
                pass
        assert [path.name for path in folder.iterdir()] == [name]
        (folder / name).unlink()
    with parts.kept_parts(folder, {}, False):
        (folder / "mine.txt").write_text("mine")
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    with pytest.raises(UserError, match=r"mine\.txt: .* holds something else; move it away"):
        with parts.kept_parts(folder / "mine.txt", {}, False):
            pass


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
    assert main(command) == 0 and "continues, 2 of" in capsys.readouterr().err


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
