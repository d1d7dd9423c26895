"""A run whose `train.remat` is left to the card, as `train` takes it up."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lmwright.optim.kinds import Constant
from lmwright.planner.analytic import remat
from lmwright.program import plan as plans
from lmwright.report.read import read_run
from lmwright.train import session
from lmwright.train.session import train
from tests.resume.small_runs import in_dir


def test_the_choice_is_recorded_and_another_card_chooses_anew(
    small_run, tmp_path, monkeypatch, capsys
):
    """On each of two cards the losses are those of a run that says what was chosen."""
    names = iter(["dots", "block"])

    def planned(run, devices):
        name = next(names)
        chosen = replace(run, train=replace(run.train, remat=name))
        return plans.resolve(chosen, devices), f"remat {name}: chosen for a card"

    monkeypatch.setattr(session, "_planned", planned)
    devices = jax.devices()[:1]
    run = in_dir(small_run, tmp_path / "auto")
    assert run.train.remat == "auto"
    run = replace(run, optim=replace(run.optim, schedule=Constant()))
    half = replace(run, train=replace(run.train, steps=run.train.steps // 2))
    for part, name in ((half, "dots"), (run, "block")):
        train(part, devices)
        folder = Path(run.dir)
        assert json.loads((folder / "plan.json").read_text())["chosen"] == {"train.remat": name}
        assert json.loads((folder / "plan.json").read_text())["compute"]["remat"] == name
        assert 'remat = "auto"' in (folder / "run.toml").read_text()
        assert f"remat {name}: chosen for a card" in capsys.readouterr().out
    monkeypatch.undo()
    said = in_dir(run, tmp_path / "said")
    train(replace(said, train=replace(said.train, remat="block")), devices)
    assert json.loads((Path(said.dir) / "plan.json").read_text())["chosen"] == {}
    ours, theirs = (read_run(r.dir).train["loss"] for r in (run, said))
    assert ours.steps == theirs.steps
    assert ours.values == pytest.approx(theirs.values, rel=2e-3)


def test_cards_are_asked(small_run, monkeypatch):
    """A session asks the planner where there are GPUs, and the plan follows what it says."""
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: None)
    monkeypatch.setattr(session, "resolve", lambda run, devices: (run, devices))
    (run, devices), why = session._planned(small_run, [card])
    assert (run, why) == (lambda c: (c.run, c.note))(remat.settled_here(small_run, [card]))
    assert run.train.remat == "none" and "chosen for NVIDIA H200" in why and devices == [card]
    said = replace(small_run, train=replace(small_run.train, remat="mlp"))
    assert session._planned(said, [card]) == ((said, [card]), "")
