"""Models without attention are planned from what they say of their work: chunks of a recurrence are
tried, what they cannot do is refused."""

import json

import pytest

from lmwright import presets
from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.errors import UserError
from lmwright.formats.open import find_model, load_run
from lmwright.models.cached import new_cache
from lmwright.models.counts import cache_bytes
from lmwright.planner.analytic.candidates import RECURRENT_CHUNKS, candidates
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.plan import resolve
from tests.planner.runs import run_of

EXAMPLE = "examples/xlstm.toml"
V5E = parse_machine("v5e-16")


def test_the_example_is_planned(capsys):
    """By the user's command; what the TPU compiler said of it is in docs/xlstm.md."""
    assert main(["plan", EXAMPLE, "--on", "v5e-16", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["step_s"] == pytest.approx(5.32, rel=0.1)
    assert found["peak_bytes"] == pytest.approx(13.27 * 2**30, rel=0.2)


def test_chunks_are_tried_and_paste_back():
    run = load_run(EXAMPLE)
    found = candidates(run, V5E, meshes=[run.mesh], remats=["mlp"])
    assert {way.run.model.chunk_tokens for way in found} == set(RECURRENT_CHUNKS)
    other = next(way for way in found if way.run.model.chunk_tokens == 128)
    assert load_run(EXAMPLE, other.overrides) == other.run and not other.changes_training
    assert "chunks of 128" in other.label


def test_chunks_have_a_best_size():
    """Short ones write their memory often, long ones multiply more."""
    sizes = (16, 256, 2048)
    each = [
        Quick.of(load_run(EXAMPLE, [f"model.chunk_tokens={size}"]), V5E).timing.by_kind["mixing"]
        for size in sizes
    ]
    assert each[1] < each[0] / 3 and each[1] < each[2] / 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["model.chunk_tokens=96"], r"model.chunk_tokens: 96 does not divide the 2048 tokens"),
        (["mesh.context=2", "mesh.fsdp=4"], r"mesh.context: a xlstm model cannot cut its rows"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, message):
    import jax

    run = run_of(tmp_path, *words, preset="xlstm-165m")
    with pytest.raises(UserError, match=message):
        resolve(run, jax.devices()[:8])


def test_a_state_has_the_same_bytes_at_any_length():
    """That of the 7B is the sum of the paper's sizes, in float32."""
    model = find_model("xlstm-7b")
    by_hand = 32 * 8 * (256 * 512 + 256 + 1) * 4
    assert cache_bytes(model, 1) == cache_bytes(model, 8192) == by_hand == 134_480_896
    small = presets.of_section("model")["xlstm-7m"]()
    layers = new_cache(small, 2, 64, Compute())["layers"]["layers"]
    assert layers.matrix.shape == (4, 2, 4, 32, 64)


def test_fields_of_attention_are_unknown():
    with pytest.raises(UserError, match=r"num_kv_heads=2: a preset has no such field"):
        find_model("xlstm-7m", ["num_kv_heads=2"])
