"""Run directories whose names are patterns to `glob`: a sweep's `lr[3e-4]`, a folder `[old]`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.checkpoint.files import ExactPath
from lmwright.checkpoint.saved import SavedStates
from lmwright.checkpoint.store import Checkpoints
from lmwright.cli.main import main
from lmwright.config.run import Checkpoint
from lmwright.errors import StorageError

NAMES = ["lr[3e-4]", "a*", "x?[1]/r", "[ab"]


def saves(folder):
    """Saves three states, of which two are kept, and reads the newest as `generate` does."""
    states = [{"w": jnp.arange(12.0).reshape(3, 4) + i} for i in range(3)]
    with Checkpoints(folder, Checkpoint(keep_last=2)) as checkpoints:
        for step, state in enumerate(states):
            checkpoints.save(step, state, {"step": step})
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and not checkpoints.files.unfinished()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), states[0])
    found, meta = SavedStates(folder).restore(shapes)
    np.testing.assert_array_equal(found["w"], states[2]["w"])
    assert meta["step"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_on_a_disk(name, tmp_path):
    (tmp_path / "ab").mkdir()  # which `a*` means, too
    saves(tmp_path / name)
    assert not list((tmp_path / "ab").iterdir())


@pytest.mark.parametrize("name", ["lr[3e-4]", "a*", "a?"])
def test_in_a_bucket(name, tmp_path, capsys):
    """Whose client takes them for patterns even where it removes files."""
    file = tmp_path / "run.toml"
    file.write_text('recipe = "quickstart"\nname = "x"\ndata.dir = "data"\n')
    assert main(["train", str(file), f"dir=gs://somewhere/{name}"]) == 2
    assert "takes for a pattern of several names" in capsys.readouterr().err


def test_a_checkpoint_that_could_not_be_loaded_does_not_count(tmp_path, monkeypatch):
    """Orbax leaves the parts of processes apart without a word where it finds none."""
    monkeypatch.setattr("lmwright.checkpoint.store.time.sleep", lambda seconds: None)
    monkeypatch.setattr(ExactPath, "glob", lambda self, pattern: iter(()))
    checkpoints = Checkpoints(tmp_path, Checkpoint(), warn=lambda line: None)
    with pytest.raises(StorageError, match="its parts were not joined"):
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
    assert checkpoints.steps() == []
