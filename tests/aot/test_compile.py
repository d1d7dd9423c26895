"""The train step compiled by the TPU compiler itself, for slices that are not here.

golden/collectives.json has which collectives each compiled step runs, and how often. After a
change that is meant: `LMWRIGHT_GOLDEN=write pytest tests/aot/test_compile.py`, and read the diff.
"""

import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler import cost, hlo
from lmwright.planner.report import Report
from lmwright.program import cache
from lmwright.program.executable import refuse_option
from tests.aot.programs import SHARED, check_compiled
from tests.aot.slices import needs_libtpu, run_of

GOLDEN = Path(__file__).parent / "golden" / "collectives.json"


def check_collectives(name, found, where):
    """The counts are those of the golden file, where the compiler is the one that it is of;
    another one's kinds at least."""
    counts = dict(sorted(cost.estimate(hlo.parse(found.hlo), where).collectives.items()))
    golden, libtpu = json.loads(GOLDEN.read_text()), importlib.metadata.version("libtpu")
    if os.environ.get("LMWRIGHT_GOLDEN") == "write":
        kept = {} if golden["libtpu"] != libtpu else golden["steps"]
        golden = {"libtpu": libtpu, "steps": dict(sorted((kept | {name: counts}).items()))}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    if golden["libtpu"] == libtpu:
        assert counts == golden["steps"][name]
    else:
        assert set(counts) == set(golden["steps"][name])


def collectives(hlo):
    return set(re.findall(r"\b(all-gather|all-reduce|reduce-scatter|all-to-all)\b", hlo))


@needs_libtpu
@pytest.mark.parametrize(
    "slice_name, batch, mesh, kinds",
    [
        ("v5e-8", 8, (), {"all-gather", "all-reduce"}),  # one row a device
        pytest.param("v5e-8", 64, (), {"all-gather", "all-reduce"}, marks=pytest.mark.slow),
        pytest.param(
            "v4-32", 64, ("mesh.tensor=2",), {"all-gather", "all-reduce"}, marks=pytest.mark.slow
        ),
        pytest.param("v6e:1x1", 64, (), set(), marks=pytest.mark.slow),  # a minute
    ],
)
def test_a_preset_compiles_and_fits(slice_name, batch, mesh, kinds, tmp_path):
    found = aot.compile_for(run_of(tmp_path, *mesh, batch=batch), parse_slice(slice_name))
    shards = found.mesh["fsdp"] * found.mesh["tensor"]
    assert found.fits and shards == parse_slice(slice_name).num_devices
    assert kinds <= collectives(found.hlo) if kinds else not collectives(found.hlo)
    # fp32 weights and AdamW's two fp32 moments; a few norms are whole on every device
    assert found.weights_bytes == pytest.approx(4 * found.num_params / shards, rel=0.02)
    assert found.optimizer_bytes == pytest.approx(2 * found.weights_bytes, rel=0.001)
    assert found.argument_bytes >= found.weights_bytes + found.optimizer_bytes
    assert found.peak_bytes < 16 * 2**30
    check_estimate(found, parse_slice(slice_name))
    name = " ".join(["llama-15m", slice_name, *mesh, *["one row each"] * (batch == 8)])
    check_collectives(name, found, parse_slice(slice_name))
    if name in SHARED:
        check_compiled(name, found, parse_slice(slice_name))


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "changes",
    [
        ("train.remat=dots", "train.num_microbatches=2"),
        ("train.remat=gate", "train.loss_chunk_tokens=512"),
        ("train.remat=block", "mesh.fsdp=8", "mesh.tensor=2"),
    ],
)
def test_the_flagship_compiles_and_fits(changes, tmp_path):
    run = run_of(tmp_path, "data.tokenizer.vocab_size=50304", *changes, preset="kisoku-3b",
                 batch=128)  # fmt: skip
    where = parse_slice("v4-32")
    found = aot.compile_for(run, where)
    assert found.fits
    check_estimate(found, where)
    check_collectives(" ".join(["kisoku-3b", where.name, *changes]), found, where)


@pytest.mark.slow
@needs_libtpu
def test_the_flagship_with_long_rows(tmp_path):
    """Rows of 8,192 tokens, one a device and turn: products that are saved are written into the
    stack of layers by themselves, and the step takes 55 % of the peak."""
    lengths = "model.seq_len=8192", "data.pack.seq_len=8192", "data.tokenizer.vocab_size=50304"
    changes = "train.remat=dots", "train.num_microbatches=2"
    head = "train.head_gradient=once", "train.loss_chunk_tokens=2048"
    run = run_of(tmp_path, *lengths, *changes, *head, preset="kisoku-3b", batch=32)
    where = parse_slice("v4-32")
    found = aot.compile_for(run, where)
    assert found.fits and Report(run, where, found).mfu > 0.55
    # gate and up, in four pieces: products that write into the stack of layers
    stack = r"dynamic-update-slice_fusion\S* = \(bf16\[32,4,2048,8192\].* kind=(\w+)"
    assert re.findall(stack, found.hlo) == ["kOutput"] * 2


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "slice_name, changes, kind, kernel",
    [
        ("2xv5e-8", ("mesh.data=2",), "send", True),
        ("2xv5e-8", ("mesh.stage=2", "train.num_microbatches=4"), "send", True),
        ("v5e-8", ("mesh.stage=2", "train.num_microbatches=4"), "collective-permute", True),
        ("v5e-8", ("mesh.context=4",), "collective-permute", False),
        (
            "v5e-8",
            ("mesh.context=2", "train.context_attention=all_to_all"),
            "all-to-all",
            True,
        ),
    ],
)
def test_every_axis_compiles(slice_name, changes, kind, kernel, tmp_path):
    found = aot.compile_for(run_of(tmp_path, *changes), parse_slice(slice_name))
    assert found.fits
    assert re.search(rf" {kind}(-start)?\(", found.hlo)
    assert ("row_attention" in found.hlo) == kernel


@needs_libtpu
def test_a_mesh_that_would_cross_slices_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"over 2 slices.*mesh.data=2$"):
        aot.compile_for(run_of(tmp_path, "mesh.fsdp=16"), parse_slice("2xv5e-8"))


@pytest.mark.slow
@needs_libtpu
def test_data_takes_the_slices(tmp_path):
    found = aot.compile_for(run_of(tmp_path), parse_slice("2xv5e-8"))
    assert (found.mesh["data"], found.mesh["fsdp"]) == (2, 8)


def check_estimate(found, where):
    """The matmuls in the program, loops counted as they turn, are those of the model: six
    FLOPs a weight and token, up to eight with what `remat = "block"` computes again."""
    got = cost.estimate(hlo.parse(found.hlo), where)
    assert got.unknown_loops == 0
    whole = got.matmul_flops * where.num_devices / (found.num_params * found.tokens_per_step)
    assert 5.9 < whole < 8.6, whole
    assert sum(got.by_kind.values()) == pytest.approx(got.step_s)
    assert got.step_s > found.flops_per_step / where.num_devices / 1e15
    assert bool(got.collectives) == (where.num_devices > 1)


@needs_libtpu
def test_what_does_not_fit_is_told_by_the_compiler(tmp_path):
    run = run_of(tmp_path, preset="llama-7b", batch=8)
    found = aot.compile_for(run, parse_slice("v5e-8"))
    assert not found.fits
    assert found.peak_bytes > found.limit_bytes > 15 * 2**30


@needs_libtpu
def test_a_run_that_the_slice_cannot_hold_is_refused_in_one_line(tmp_path):
    run = run_of(tmp_path, batch=12)
    with pytest.raises(UserError, match=r"train.global_batch_size: 12 rows"):
        aot.compile_for(run, parse_slice("v5e-8"))


def test_without_the_compiler_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed; .*\.\[tpu\]"):
        aot.require_libtpu()


def test_sizes_in_the_compilers_messages():
    said = "total memory required for HLO temporaries (32.61G) exceeds available HBM (31.24G)"
    assert aot.memory_of_error(said) == (int(32.61 * 2**30), int(31.24 * 2**30))
    said = "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm ..."
    assert aot.memory_of_error(said) == (int(20.5 * 2**30), int(15.75 * 2**30))
    with pytest.raises(UserError, match=r"^train.compiler_options.xla_foo: .* no such option"):
        refuse_option("INVALID_ARGUMENT: No such compile option: 'xla_foo'")
    refuse_option("INTERNAL: something else")
    assert aot.memory_of_error("INTERNAL: something else") is None


@needs_libtpu
def test_a_failure_that_is_not_about_memory_of_the_chip_is_one_sentence(tmp_path, capsys):
    run_of(tmp_path)
    words = ["train.compiler_options.xla_tpu_scoped_vmem_limit_kib='16'", "data.pack.seq_len=128"]
    small = {"num_layers": 1, "vocab_size": 1024, "embed_dim": 128, "mlp_dim": 128}
    words += [f"model.{name}={size}" for name, size in small.items()]
    assert main(["plan", str(tmp_path / "run.toml"), "--on", "v5e-1", *words]) == 2
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "error" in line]
    assert out == "" and len(said) == 1, err
    assert said[0].startswith("lmwright: error: v5e-1: the TPU compiler failed and said: ")
    assert "Ran out of memory in memory space vmem" in said[0] and "--quick" in said[0]
    kept = [path.read_text() for path in cache.cache_folder().glob("*/answer.json")]
    assert not any("memory space vmem" in answer for answer in kept)  # it is no answer
