"""From a run directory: its newest weights, its tokenizer, its facts in the card."""

import jax
import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.evals.prompted import generate_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_read import import_hf
from lmwright.formats.load import load_model
from tests.saved_run import save_run, tiny_run, weights_at


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two checkpoints of an untrained model whose documents begin with bos."""
    return save_run(tiny_run(tmp_path_factory.mktemp("run")))


def test_a_run_directory_is_exported_with_its_facts(run_dir, tmp_path, capsys, monkeypatch):
    from lmwright.formats import reference

    monkeypatch.setattr(
        reference.importlib.util, "find_spec", lambda name: None
    )  # tested elsewhere
    export_command(run_dir, tmp_path / "out")
    model, w, _ = import_hf(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, w, weights_at(2, model.spec()))
    printed = capsys.readouterr().out
    assert "equal bit for bit" in printed and "transformers: not compared" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "# tiny", "| short | train |", "| short | 3.5 | 33.1 |", "| steps | 2 of 4 |",
        "| optim.learning_rate | 0.0123 |", "| data.tokenizer.vocab_size | 290 |",
    ):  # fmt: skip
        assert fact in card
    assert str(run_dir.parent) not in card
    loaded = load_model(tmp_path / "out")
    assert loaded.prompt_prefix == (loaded.tokenizer.bos_id,) == load_model(run_dir).prompt_prefix

    capsys.readouterr()
    found = [
        generate_command(path, ["the cat"], max_new_tokens=12, temperature=1.0, seed=4)
        for path in (run_dir, tmp_path / "out")
    ]
    assert found[0] == found[1] and found[0][0].prompt_tokens > 1
    assert capsys.readouterr().out == f"the cat{found[0][0].text}\n" * 2


def test_a_prompt_that_is_too_long_is_refused_before_it_is_printed(run_dir, capsys):
    with pytest.raises(UserError, match=r"prompt 1: has .* tokens and the model's context"):
        generate_command(run_dir, ["the cat " * 400], max_new_tokens=4)
    assert "cat" not in capsys.readouterr().out


def test_a_run_without_its_tokenizer(run_dir, tmp_path, monkeypatch):
    data = run_dir.parent / "data"
    data.rename(run_dir.parent / "away")
    try:
        with pytest.raises(UserError, match="tokenizer is not there"):
            export_command(run_dir, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    finally:
        (run_dir.parent / "away").rename(data)


def test_a_run_without_checkpoint(run_dir, tmp_path):
    (tmp_path / "run.toml").write_text((run_dir / "run.toml").read_text())
    with pytest.raises(UserError, match="no checkpoint"):
        load_model(tmp_path)


def test_the_card_of_an_earlier_checkpoint_has_its_figures(run_dir, tmp_path, monkeypatch):
    from lmwright.formats import reference

    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    export_command(run_dir / "checkpoints" / "1", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| short | 3.75 | 42.5 |" in card and "| steps | 1 |" in card and "33.1" not in card
