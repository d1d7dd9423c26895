"""Adapters over experts that stay in the four bits in which they are released."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.run import Pack
from lmwright.core.leaves import Int4, dequantize
from lmwright.core.param import walk
from lmwright.core.weight import nbytes
from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf
from lmwright.formats.open import load_run
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.lora import stored
from lmwright.program.lora_section import LowRank
from lmwright.train.session import train
from tests.released_experts import write_released
from tests.resume.small_runs import in_dir, losses

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt-oss-lora.toml"

pytest.importorskip("torch", reason="torch writes the folder")
pytest.importorskip("transformers")


def test_adapters_learn_over_the_released_numbers(small_run, tmp_path):
    """A base in its four bits, on two devices, is the one in bfloat16, in half the memory, and
    trains the same."""
    released, found = write_released(tmp_path, num_layers=1), {}
    for base, devices in (("mxfp4", 2), ("bf16", 1)):
        run = replace(
            in_dir(small_run, tmp_path / base),
            model=import_hf(released)[0],
            data=replace(small_run.data, sources=(), pack=Pack(seq_len=32)),
            train=replace(small_run.train, steps=3, init_from=str(released)),
            lora=LowRank(targets=("attention",), rank=3, base=base),
        )
        train(run, jax.devices()[:devices])
        kept = jax.jit(partial(stored, run))(import_hf(released)[1])
        found[base] = losses(run), dict(walk(kept))
    assert found["mxfp4"][0] == pytest.approx(found["bf16"][0], rel=1e-6)
    packed, wide = found["mxfp4"][1], found["bf16"][1]
    matrices = [name for name, leaf in packed.items() if isinstance(leaf, Int4)]
    assert {name.rpartition(".")[2] for name in matrices} == {
        "expert_gate", "expert_up", "expert_down"
    }  # fmt: skip
    bytes_of = lambda leaves: nbytes([leaves[name] for name in matrices])  # noqa: E731
    assert 3 * bytes_of(packed) < bytes_of(wide)
    for name, leaf in wide.items():
        np.testing.assert_array_equal(dequantize(packed[name], leaf.dtype), leaf, name)


def test_a_model_without_experts_is_refused(small_run, tmp_path):
    run = replace(in_dir(small_run, tmp_path / "run"), lora=LowRank(base="mxfp4"))
    with pytest.raises(UserError, match=r'base: mxfp4 holds the matrices of experts.*use "int4"'):
        train(run, jax.devices()[:1])


def test_the_example_fits_the_machines_that_it_names():
    for words, machine in (
        ((), "v6e-1"),
        (("mesh.expert=8", "train.global_batch_size=8"), "v5e-8"),
        (("mesh.expert=8", "train.global_batch_size=8", "model.preset=gpt-oss-120b"), "v5e-8"),
    ):
        run = load_run(EXAMPLE, words)
        assert Quick.of(run, parse_machine(machine)).fits
