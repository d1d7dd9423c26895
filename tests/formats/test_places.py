"""What killed exports leave is removed by the next one; names that cannot be are one sentence."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.formats import gguf_write, hf_write, places, proof
from lmwright.formats.convert import export_command
from lmwright.formats.hf_write import new_folder
from lmwright.formats.load import load_model
from lmwright.formats.peft_folder import PeftFolder, PeftModule, make_config, write_folder
from lmwright.formats.reference import Reference
from lmwright.guard.folders import exchange
from lmwright.models.bitnet import BitNet
from lmwright.models.deberta import Deberta
from lmwright.models.llama import Llama
from tests.in_memory import export_hf

MODEL = Llama(
    vocab_size=67, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, seq_len=40,
)  # fmt: skip
SIZES = {
    "vocab_size": 67, "embed_dim": 32, "mlp_dim": 64, "num_layers": 1, "num_heads": 2,
    "num_kv_heads": 2, "head_dim": 16, "seq_len": 40,
}  # fmt: skip
STORED_OTHERWISE = {
    "fp32": Deberta(**SIZES, max_distance=200),  # read by the names of several writers
    "ternary": BitNet(**SIZES),
}

KILLED = """
import os, signal, sys
from pathlib import Path
from lmwright.formats.places import unfinished
for name, ending in (("m", ".tmp"), ("m.gguf", ".gguf")):
    path = unfinished(Path(name), ending)
    if ending == ".tmp":
        path.mkdir()
        path = path / "model.safetensors"
    path.write_bytes(bytes(10_000))
os.rename("m", unfinished(Path("m"), ".old"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def weights(model):
    rng = np.random.default_rng(0)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, model.spec())


def hidden(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


@pytest.fixture
def model(tmp_path):
    export_hf(MODEL, weights(MODEL), None, tmp_path / "m")
    return tmp_path / "m"


def test_weights_that_give_no_logits_are_one_sentence(tmp_path):
    """Finite ones that overflow, of a run that diverged."""
    w = weights(MODEL)
    for name in ("gate", "up"):
        w["layers"][name][:] = 3e38
    with pytest.raises(UserError, match="gives logits that are not finite: the training diverged"):
        export_hf(MODEL, w, None, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_process_are_found(model, tmp_path, monkeypatch):
    shutil.copytree(model, tmp_path / "source")
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 3 and not model.exists()
    # of processes that may still be there: this very one, and one of another host
    alive = tmp_path / f".m.{places.HOST}-{os.getppid()}.tmp"
    elsewhere, earlier = tmp_path / ".m.elsewhere-4000000.tmp", tmp_path / ".m.gguf.4000000.gguf"
    alive.mkdir(), elsewhere.mkdir(), earlier.write_bytes(b"x")
    with pytest.raises(UserError, match="holds an earlier export"):  # which was put back
        export_command(tmp_path / "source", model)
    assert load_model(model).model == MODEL
    export_command(tmp_path / "source", model, overwrite=True)
    export_command(tmp_path / "source", tmp_path / "m.gguf", dtype="fp32")
    assert set(hidden(tmp_path)) == {alive.name, elsewhere.name, earlier.name}
    for path in (elsewhere, earlier):
        os.utime(path, (time.time() - 2 * places.DAY,) * 2)
    with new_folder(tmp_path / "m", overwrite=True) as folder:
        (folder / "x").write_text("x")
    export_command(tmp_path / "source", tmp_path / "m.gguf", dtype="fp32", overwrite=True)
    assert hidden(tmp_path) == [alive.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, overwrite):
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        places.refuse_existing(tmp_path, overwrite)


def test_what_came_meanwhile_is_not_replaced(model, tmp_path, monkeypatch):
    """Another command, or the user, made something of that name while it was written."""
    out = tmp_path / "out"
    with pytest.raises(UserError, match="is not empty and was not written by"):
        with new_folder(out) as folder:
            (folder / "x").write_text("x")
            out.mkdir()
            (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").read_text() == "mine"
    file, prove = tmp_path / "m.gguf", gguf_write.prove

    def meanwhile(*words, **options):
        file.write_text("mine")
        return prove(*words, **options)

    monkeypatch.setattr(gguf_write, "prove", meanwhile)
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        export_command(model, file, dtype="fp32")
    assert file.read_text() == "mine" and not hidden(tmp_path)


def test_a_link_to_nothing_is_not_replaced(tmp_path):
    """What was to be written there, on another disk say, would lie here."""
    (tmp_path / "m.gguf").symlink_to(tmp_path / "disk" / "m.gguf")
    said = "is a link to a file that is not there; replace it with --overwrite"
    with pytest.raises(UserError, match=said):
        places.refuse_existing(tmp_path / "m.gguf", False)
    places.refuse_existing(tmp_path / "m.gguf", True)
    assert (tmp_path / "m.gguf").is_symlink()


def test_containers_of_one_name_leave_each_other_alone(tmp_path, monkeypatch):
    """Their processes are counted apart: this one's number may be nobody's in the other."""
    theirs = tmp_path / f".out.{places.HOST}1-4000000.tmp"
    theirs.mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("x")
    assert theirs.exists() and str(os.stat("/proc/self/ns/pid").st_ino) in places.HOST


def test_an_adapter_that_is_there_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    said = f"{tmp_path}: holds an adapter; remove it, or choose another folder"
    with pytest.raises(UserError, match=said), new_folder(tmp_path):
        pass


def test_a_command_of_adapters_that_was_killed_as_it_ended_is_run_again(tmp_path, capsys):
    """They have no --overwrite: the same folder once more is the end that was not told."""
    rng = np.random.default_rng(0)
    for name in "ab":
        a, b = (rng.standard_normal(shape).astype("f4") for shape in ((2, 8), (6, 2)))
        modules = {"model.layers.0.mlp.up_proj": PeftModule(a, b, 1.0, None)}
        (tmp_path / name).mkdir()
        config = make_config(modules, "base", dict.fromkeys(modules, 2.0))
        write_folder(tmp_path / name, PeftFolder(config, modules))
    folders = [str(tmp_path / name) for name in ("both", "a", "b")]
    for _ in range(2):
        assert main(["adapters", "combine", *folders, "--method", "cat"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "both").iterdir()}
    assert main(["adapters", "combine", *folders, "--method", "linear"]) == 2
    assert "both: holds an adapter; remove it, or choose" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "both").iterdir()}
    assert not hidden(tmp_path)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_overwritten_folder_is_there_all_the_time(exchanges, tmp_path, monkeypatch):
    for name in ("m", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "convert.json").write_text(name)
    if not exchanges:  # as on other systems
        monkeypatch.setattr(hf_write, "exchange", lambda *_: False)
    elif not exchange(tmp_path / "m", tmp_path / "other"):
        pytest.skip("names cannot be exchanged here")
    renamed, rename = [], os.rename
    monkeypatch.setattr(os, "rename", lambda *names: (renamed.append(names), rename(*names)))
    with new_folder(tmp_path / "m", overwrite=True) as folder:
        (folder / "convert.json").write_text("new")
    assert (tmp_path / "m" / "convert.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "other"]
    assert len(renamed) == (0 if exchanges else 1)


@pytest.mark.parametrize("name", ["m", "m.gguf"])
def test_a_flipped_bit_of_what_was_written_is_found(name, model, tmp_path, capsys):
    export_command(model, tmp_path / "m.gguf", dtype="q8_0")
    path = tmp_path / name
    file = path / "model.safetensors" if path.is_dir() else path
    words = ["export", str(path), str(tmp_path / "out")]
    assert main([*words, "--dtype", "bf16"]) == 0
    shutil.rmtree(tmp_path / "out")
    raw = bytearray(file.read_bytes())
    raw[-300] ^= 1
    file.write_bytes(raw)
    for verb in (words, ["import", *words[1:]], ["verify", str(model), str(path)]):
        assert main(verb) == 2
        assert "its weights differ from those recorded in" in capsys.readouterr().err
    note = path / "convert.json" if path.is_dir() else tmp_path / "m.gguf.convert.json"
    note.write_text("[" * 100_000)
    assert main(words) == 2 and "cannot be read" in capsys.readouterr().err
    note.unlink()
    assert main(["export", str(path), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("dtype", STORED_OTHERWISE)
def test_a_flipped_bit_is_found_where_tensors_are_not_read_as_they_are_stored(
    dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "it is slow"))
    model = STORED_OTHERWISE[dtype]
    export_hf(model, weights(model), None, tmp_path / "m", dtype=dtype)
    load_model(tmp_path / "m").check()
    file = tmp_path / "m" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-300] ^= 1
    file.write_bytes(raw)
    with pytest.raises(UserError, match="its weights differ from those recorded in"):
        load_model(tmp_path / "m").check()


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_killed_command_is_cleaned_up_after(out, model, tmp_path):
    words = [sys.executable, "-m", "lmwright", "export", str(model), str(tmp_path / out)]
    for _ in range(3):
        child = subprocess.Popen(words)
        while child.poll() is None and not hidden(tmp_path):
            time.sleep(0.005)
        child.kill()
        child.wait()
    assert main(["export", str(model), str(tmp_path / out)]) == 0
    assert hidden(tmp_path) == []


def test_a_command_that_is_told_to_end_puts_away_what_it_wrote(tmp_path):
    with pytest.raises(SystemExit) as ended:
        with places.being_written(tmp_path / "out", ".tmp") as path:
            path.mkdir()
            (path / "model.safetensors").write_bytes(bytes(10))
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_an_export_that_is_told_to_end(out, model, tmp_path):
    before = set(tmp_path.iterdir())
    words = [sys.executable, "-m", "lmwright", "export", str(model), str(tmp_path / out)]
    child = subprocess.Popen(words)
    while child.poll() is None and not hidden(tmp_path):
        time.sleep(0.005)
    child.terminate()
    assert child.wait() == 143 and set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name, says",
    [
        ("a\0b", "contains a NUL"),
        ("x" * 300, "too long"),
        ("x" * 200, "180 bytes"),
        ("\ud800", "not text"),
    ],
)
def test_names_that_no_file_has(name, says, model, tmp_path, capsys):
    for words in (["export", str(model), name], ["import", str(model), f"{name}.gguf"]):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    for words in (["export", name, "y"], ["verify", str(model), name]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("lmwright: error: ")
    assert main(["params", "x" * 300]) == 2


def test_a_link_to_a_folder_stays_a_link(model, tmp_path):
    real = tmp_path / "disk" / "m"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/m")
    for overwrite in (False, True):
        export_command(model, tmp_path / "link", overwrite=overwrite)
        assert (tmp_path / "link").is_symlink() and (real / "model.safetensors").exists()
        assert not hidden(tmp_path) and not hidden(real.parent)


@pytest.mark.parametrize("calls", range(4))
def test_the_proof_of_another_file_never_lies_beside_a_gguf(calls, model, tmp_path, monkeypatch):
    """Wherever the command is killed among the last changes of names."""
    out, note = tmp_path / "m.gguf", tmp_path / "m.gguf.convert.json"
    export_command(model, out, dtype="fp32")
    left = [calls]

    def counted(change):
        def changed(*args, **options):
            if Path(args[-1]).name in (out.name, note.name):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return change(*args, **options)

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        with suppress(KeyboardInterrupt):
            export_command(model, out, dtype="bf16", overwrite=True)
    load_model(out).check()
    assert not hidden(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_current_folder_is_no_place_of_an_export(tmp_path, monkeypatch, overwrite):
    """It would be another one of the same name, and the shell in a deleted folder."""
    here = tmp_path / "here"
    here.mkdir()
    if overwrite:
        export_hf(MODEL, weights(MODEL), None, here)
    monkeypatch.chdir(here)
    before = here.stat().st_ino, {*here.iterdir()}
    with pytest.raises(UserError, match=r"here: is the current folder, .* name a new folder in it"):
        export_hf(MODEL, weights(MODEL), None, ".", overwrite=overwrite)
    assert (Path(".").stat().st_ino, {*here.iterdir()}) == before
    assert [*tmp_path.iterdir()] == [here]
