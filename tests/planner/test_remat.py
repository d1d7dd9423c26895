"""`train.remat` where the run leaves it to the card: the leanest of the fastest that fit."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import UNCHOSEN
from lmwright.core.compute import REMATS
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.devices import GPUS
from lmwright.planner.analytic import remat
from lmwright.planner.analytic.layout import Layout
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.plan import resolve
from tests.planner.runs import SMALL, run_of

H100 = parse_machine("gpu:h100x1")
GIB = 2**30


def answer(step_s, gib, limit=100.0):
    """An answer of the analytic model with this time and memory."""
    return SimpleNamespace(
        step_s=step_s, memory=SimpleNamespace(peak=gib), limit_bytes=limit, fits=gib <= limit
    )


def test_the_leanest_within_one_percent_of_the_fastest():
    a, b, c = answer(1.0, 80), answer(1.009, 60), answer(1.011, 40)
    assert remat.leanest_of_fastest([a, b, c]) is b
    assert remat.leanest_of_fastest([a, c]) is a
    # the fastest is that of those that fit, with room for what no estimate counts
    full = answer(0.5, 95)
    assert remat.leanest_of_fastest([full, a, b, c]) is b
    assert remat.leanest_of_fastest([full, answer(0.6, 101)]) is full  # none fits: the leanest
    same = answer(1.0, 60)
    assert remat.leanest_of_fastest([answer(1.0, 60), same]) is same  # the later policy


def chosen(run, machine=H100):
    return remat.settled(run, machine).run.train.remat


def test_the_card_decides_by_its_memory(tmp_path):
    """Less memory, fewer results that are kept; what is said otherwise stays."""
    run = run_of(tmp_path, "model.seq_len=2048", preset="llama-135m", batch=16)
    assert run.train.remat == "auto_block"
    found = []
    for gib in (60, 24, 16, 12, 9, 6, 2):
        machine = replace(H100, usable_bytes=gib * GIB)
        choice = remat.settled(run, machine)
        name = choice.run.train.remat
        found.append(name)
        quick = Quick.of(choice.run, machine)
        room = quick.memory.peak <= remat.ROOM_SHARE * machine.usable_bytes
        assert room or name == "block"
        assert ("none fits" in choice.note) == (not room)
        assert f"remat {name}: chosen for gpu:h100x1, the leanest" in choice.note
    assert found[0] == "none" and found[-1] == "block" and len(set(found)) > 2
    order = list(REMATS)
    assert found == sorted(found, key=order.index)
    for name in REMATS:
        said = replace(run, train=replace(run.train, remat=name))
        assert remat.settled(said, H100) == remat.Choice(said)


def test_a_big_model_keeps_less(tmp_path):
    words = ("model.seq_len=4096",)
    small = run_of(tmp_path, *words, preset="llama-135m", batch=4)
    big = run_of(tmp_path, *words, preset="llama-8b", batch=8)
    assert chosen(small) == "none"
    assert chosen(big) == "block" and "none fits" in remat.settled(big, H100).note
    assert chosen(big, parse_machine("gpu:h100x8")) != "block"  # a row each, states cut


@pytest.mark.parametrize("machine", ["v4-32", "cpu:4"])
def test_elsewhere_nothing_is_chosen(machine, tmp_path):
    run = run_of(tmp_path, *SMALL)
    plain = replace(run, train=replace(run.train, remat="auto"))
    for each, name in ((run, "block"), (plain, "none")):
        choice = remat.settled(each, parse_machine(machine))
        assert (choice.run.train.remat, choice.note) == (name, "")
        assert UNCHOSEN[each.train.remat] == each.train.fixed_remat == name
        assert resolve(each).compute.remat == name  # of a CPU


def test_only_what_goes_with_the_other_settings(tmp_path):
    base = run_of(tmp_path, "model.seq_len=2048", preset="llama-135m", batch=4)
    for field, value, names in (
        ("offload", "products", {"block"}),
        ("mlp_chunk_tokens", 512, {"mlp", "block"}),
        ("block_inputs", "int8", set(REMATS) - {"none"}),
    ):
        run = replace(base, train=replace(base.train, **{field: value}))
        assert chosen(run) in names
    with pytest.raises(UserError, match=r"train.offload: 'attention' has no effect"):
        load_run(tmp_path / "run.toml", ["train.remat=auto", "train.offload=attention"])


def card(kind, gib=None, count=1):
    """Devices of JAX that are cards of this kind."""
    stats = None if gib is None else {"bytes_limit": int(gib * GIB)}
    one = SimpleNamespace(platform="gpu", device_kind=kind, memory_stats=lambda: stats)
    return [one] * count


def test_training_chooses_as_plan_does(tmp_path, monkeypatch):
    run = run_of(tmp_path, "model.seq_len=2048", preset="llama-135m", batch=16)
    name = "NVIDIA H100 80GB HBM3"
    for gib in (None, 59.7):  # three quarters of what it has are a little less than 60
        choice = remat.settled_here(run, card(name, gib))
        assert choice.run == remat.settled(run, H100).run
        assert f"chosen for {name}" in choice.note
    less = remat.settled_here(run, card(name, 12.0))
    assert less.run == remat.settled(run, replace(H100, usable_bytes=12 * GIB)).run
    eight = remat.settled_here(run, card(name, 59.7, count=8)).run
    assert eight == remat.settled(run, parse_machine("gpu:h100x8")).run
    monkeypatch.setattr(remat.jax, "process_count", lambda: 2)
    assert remat.settled_here(run, card(name, 12.0)).run == remat.settled(run, H100).run


@pytest.mark.parametrize("name", GPUS)
def test_a_known_card_is_found_by_what_jax_calls_it(name):
    found = remat.machine_here(card(GPUS[name].device_kind, count=2))
    assert (found.kind, found.num_devices) == (name, 2)


def test_an_unknown_card_counts_with_its_memory(tmp_path):
    run = run_of(tmp_path, "model.seq_len=2048", preset="llama-135m", batch=16)
    found = [remat.settled_here(run, card("NVIDIA RTX 9090", gib)) for gib in (60, 6, None)]
    assert [c.run.train.remat for c in found] == ["none", "block", "block"]
    assert found[2].note == "remat block: the memory of NVIDIA RTX 9090 is not known"
    with pytest.raises(UserError, match="no bf16"):  # as where the run is resolved
        Quick.of(run, remat.machine_here(card("Tesla T4", 12)))
    fp32 = replace(run, train=replace(run.train, precision="fp32"))
    machine = remat.machine_here(card("Tesla T4", 12))
    assert Layout.of(Quick.of(fp32, machine).plan)[0].kernels == "early gpu"


def test_plan_says_what_was_chosen(tmp_path, capsys):
    run_of(tmp_path, "model.seq_len=2048", preset="llama-135m", batch=16)
    words = ["plan", str(tmp_path / "run.toml"), "--quick", "--on", "gpu:h100x1"]
    words.append("model.seq_len=2048")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "remat none: chosen for gpu:h100x1, the leanest of the fastest that fit" in out
    assert "tokens a step, remat none" in out
    assert main([*words, "--json", "train.remat=gate"]) == 0
    assert json.loads(capsys.readouterr().out)["remat"] == "gate"


def test_a_choice_is_not_written_down(tmp_path):
    """A run that goes on another card chooses anew."""
    run = run_of(tmp_path, *SMALL)
    (tmp_path / "run.toml").write_text(dump_toml(run))
    assert load_run(tmp_path / "run.toml").train.remat == "auto_block"
