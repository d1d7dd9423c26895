"""Candidates are legal, keep what is learned, and their overrides paste back."""

from dataclasses import replace

import pytest

from lmwright.config.run import Mesh
from lmwright.core.sharding import mesh_shape
from lmwright.formats.open import load_run
from lmwright.planner.advice import TIE_SHARE
from lmwright.planner.analytic.candidates import candidates, rank, with_kind
from lmwright.planner.analytic.layout import on_paper
from lmwright.planner.analytic.machine import parse_machine
from tests.planner.runs import SMALL, run_of

V4 = parse_machine("v4-32")


def test_overrides_pasted_give_the_very_run(tmp_path):
    run = run_of(tmp_path, "optim.clip_norm=none", "optim.schedule.floor_fraction=0.2")
    found = candidates(run, V4, optimizers=True)
    seen = set()
    for candidate in found:
        key = (candidate.run.optim.kind, candidate.run.train.remat)
        if key not in seen:
            seen.add(key)
            given = ["optim.clip_norm=none", "optim.schedule.floor_fraction=0.2"]
            pasted, meant = (
                load_run(tmp_path / "run.toml", [*given, *candidate.overrides]),
                candidate.run,
            )
            assert replace(pasted, mesh=meant.mesh) == meant
            assert mesh_shape(pasted.mesh, 16) == mesh_shape(meant.mesh, 16)
    assert {kind for kind, _ in seen} == {"adamw", "adam8bit"} and len(seen) == 10


@pytest.mark.parametrize("schedule", ["wsd", "inverse-sqrt", "constant"])
def test_a_schedule_survives_another_optimizer(tmp_path, schedule):
    extra = {"wsd": ("optim.schedule.decay_steps=50",), "constant": ()}
    given = (f"optim.schedule.kind={schedule}", "optim.schedule.warmup_steps=7")
    given += extra.get(schedule, ())
    run = run_of(tmp_path, *given, preset="llama-135m")
    found = candidates(run, V4, meshes=[run.mesh], remats=["mlp"], optimizers=True)
    other = next(c for c in found if c.changes_training)
    assert load_run(tmp_path / "run.toml", [*given, *other.overrides]) == other.run
    assert other.run.optim.schedule == run.optim.schedule


def test_the_batch_stays_and_every_mesh_is_legal(tmp_path):
    run = run_of(tmp_path)
    found = candidates(run, V4)
    assert len({c.run.mesh for c in found}) > 5
    for candidate in found:
        assert candidate.run.train.global_batch_size == 128
        assert candidate.run.optim == run.optim and not candidate.changes_training
        on_paper(candidate.run, V4)
        assert V4.fits_torus(vars(candidate.run.mesh))
    assert found == sorted(found, key=rank)
    assert found[0].quick.fits and not found[0].overrides == ()


def test_axes_are_cut_only_where_no_whole_ones_serve(tmp_path):
    run = run_of(tmp_path)  # 8 kv heads and 128 rows: neither 16 x 16 nor 256 x 1
    machine = parse_machine("v5e-256")
    found = candidates(run, machine)
    assert found and not any(machine.fits_torus(vars(c.run.mesh)) for c in found)


def test_slices_are_crossed_by_data_alone(tmp_path):
    found = candidates(run_of(tmp_path), parse_machine("2xv5e-16"))
    assert found and all(c.run.mesh.data % 2 == 0 for c in found)


def test_an_optimizer_that_trains_differently_must_win_by_more_than_a_tie(tmp_path):
    found = candidates(run_of(tmp_path), V4, optimizers=True)
    first = found[0]
    assert not first.changes_training
    other = next(c for c in found if c.changes_training)
    assert other.quick.step_s > first.quick.step_s / (1 + TIE_SHARE)
    assert other.label.endswith("adam8bit*")


def test_what_two_optimizers_have_in_common(tmp_path):
    old = run_of(tmp_path, *SMALL, "optim.beta2=0.97").optim
    new = with_kind(old, "adam8bit")
    assert (new.kind, new.beta2, new.learning_rate) == ("adam8bit", 0.97, old.learning_rate)
    assert new.schedule == old.schedule and new.clip_norm == old.clip_norm


def test_a_mesh_that_the_run_has_anyway_is_not_named(tmp_path):
    run = run_of(tmp_path)  # fsdp = "rest"
    for candidate in candidates(run, V4):
        named = any(word.startswith("mesh.") for word in candidate.overrides)
        assert named == (mesh_shape(candidate.run.mesh, 16)["fsdp"] != 16)


def test_an_open_mesh_keeps_its_words(tmp_path):
    run = run_of(tmp_path)
    found = candidates(run, V4, meshes=[run.mesh], remats=["block"])
    assert [way.run.train.head_gradient for way in found] == ["once", "by_chunk"]
    assert all(way.run.mesh == Mesh() for way in found)


LONG = "model.seq_len=8192", "data.pack.seq_len=8192"


@pytest.mark.parametrize("preset, cut", [("llama-70b", True), ("mixtral-8x7b", False),
                                         ("phi-3-medium", True)])  # fmt: skip
def test_chunks_are_offered_where_they_cut_something(tmp_path, preset, cut):
    """Tokens go to experts whole."""
    run = run_of(tmp_path, *LONG, preset=preset, batch=8)
    found = candidates(run, parse_machine("v5e-8"))
    chunks = {c.run.train.mlp_chunk_tokens for c in found}
    assert {c.run.train.offload for c in found} > {"none", "block_inputs"}  # nothing fits as it is
    assert chunks == ({None, 4096} if cut else {None})


def test_what_the_compiler_refused_is_offered_the_hosts_memory(tmp_path):
    """On any mesh, though it fits by the model."""
    run, machine = run_of(tmp_path, *SMALL, batch=8), parse_machine("v5e-4")
    assert {c.run.train.offload for c in candidates(run, machine)} == {"none"}
    found = candidates(run, machine, refused=True)
    assert {c.run.train.offload for c in found} > {"none", "block_inputs"}
    assert {c.run.optim.offload for c in found} == {"none", "moments"}
    assert len({c.run.mesh for c in found if c.run.train.offload != "none"}) > 1


def test_chunks_are_not_offered_of_rows_that_are_no_longer(tmp_path):
    short = "model.seq_len=4096", "data.pack.seq_len=4096"
    run = run_of(tmp_path, *short, preset="llama-70b", batch=8)
    found = candidates(run, parse_machine("v5e-8"))
    assert {c.run.train.offload for c in found} > {"none", "block_inputs"}
    assert {c.run.train.mlp_chunk_tokens for c in found} == {None}
