"""`lmwright plan` for GPUs: the compiler's memory where it is installed, and what is said else."""

import json
from dataclasses import replace
from itertools import pairwise

import jax
import pytest

from lmwright.cli.main import main
from lmwright.core.compute import REMATS
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.devices import GPUS
from lmwright.planner import command, longest, search
from lmwright.planner.analytic import remat
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import layer_bytes
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE, Quick
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler import gpu
from lmwright.program.executable import refuse_options
from lmwright.program.plan import resolve
from tests.planner.runs import run_of

GIB = 2**30
H100 = parse_machine("gpu:h100x1")


@pytest.fixture
def plan(tmp_path):
    """Runs the verb with words after the run file."""
    run_of(tmp_path)
    return lambda *words: main(["plan", str(tmp_path / "run.toml"), *words])


def compiled_with(peak_bytes, monkeypatch):
    """Has the compiler answer with this memory."""

    def answer(run, machine):
        assert machine.name == "gpu:h100x8"
        return aot.Compiled(
            slice=machine.name, mesh={}, num_params=1, tokens_per_step=1, flops_per_step=1.0,
            weights_bytes=1, optimizer_bytes=1, lower_s=1.0, compile_s=61.4,
            fits=peak_bytes <= machine.usable_bytes, peak_bytes=peak_bytes,
        )  # fmt: skip

    monkeypatch.setattr(command, "has_cuda_compiler", lambda: True)
    monkeypatch.setattr(command, "compile_for", answer)


def test_the_verdict_is_the_compilers(plan, capsys, monkeypatch):
    compiled_with(50 * GIB, monkeypatch)
    assert plan("--on", "gpu:h100x8") == 0
    out = capsys.readouterr().out
    assert "FITS: 50.00 of 60.00 GiB, by the compiler for CUDA\n" in out
    assert "activations and temporaries" in out and "give or take 20%" not in out
    assert "compiled in 61 s; the times are those of the analytic model" in out
    assert "no compiler was asked" not in out
    assert plan("--on", "gpu:h100x8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_bytes"], found["compile_s"]) == (50 * GIB, 61.4) and found["fits"]
    assert found["memory_by"] == "compiler" and sum(found["memory"].values()) == 50 * GIB


def test_what_does_not_fit_by_the_compiler(plan, capsys, monkeypatch):
    """Arithmetic says that it fits; what is suggested saves what is too much."""
    assert plan("--on", "gpu:h100x8", "--quick") == 0
    capsys.readouterr()
    compiled_with(61 * GIB, monkeypatch)
    assert plan("--on", "gpu:h100x8") == 1
    out = capsys.readouterr().out
    told = "61.00 of 60.00 GiB, by the compiler for CUDA: 1.00 GiB too much"
    assert f"DOES NOT FIT: {told}; this close, only the card can tell" in out
    assert "it needs 1.02 times the available memory" in out
    assert "what would make it fit" in out and "; to try: " in out


def test_without_the_compiler_memory_is_estimated(plan, capsys, monkeypatch):
    monkeypatch.setattr(command, "has_cuda_compiler", lambda: False)
    assert plan("--on", "gpu:h100x8") == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("the CUDA compiler is not installed, so this is the memory of --quick")
    assert "[cuda13]" in last and last.endswith("(no GPU is needed)")


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_described(name):
    """Each field once; memory and bandwidth are those of the plan."""
    lines = gpu.description(GPUS[name]).split()
    fields = dict(pairwise(lines))
    assert fields["memory_bandwidth:"] == str(int(GPUS[name].hbm_bytes_per_s))
    assert fields["device_memory_size:"] == str(GPUS[name].peak.hbm_bytes)
    assert parse_machine(f"gpu:{name}x1").kind == name
    assert lines.count("core_count:") == lines.count("cuda_compute_capability") == 1


class Compiler:
    """Stands in for the compiler: takes what arithmetic gives at most so many bytes."""

    def __init__(self, most_bytes, peak_bytes=30 * GIB):
        self.most, self.peak, self.runs = most_bytes, peak_bytes, []

    def __call__(self, run, machine, *, timeout_s):
        self.runs.append(run)
        fits = Quick.of(run, machine).memory.peak <= self.most
        return aot.Compiled(
            slice=machine.name, mesh={}, num_params=1, tokens_per_step=1, flops_per_step=1.0,
            weights_bytes=1, optimizer_bytes=1, lower_s=1.0, compile_s=61.4, fits=fits,
            peak_bytes=self.peak if fits else 2 * machine.usable_bytes,
        )  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Has `--search` and `--longest` ask a stand-in."""

    def install(*args):
        made = Compiler(*args)
        monkeypatch.setattr(command, "has_cuda_compiler", lambda: True)
        monkeypatch.setattr(search, "require_cuda_compiler", lambda: None)
        for module in (search, longest):
            monkeypatch.setattr(module, "compile_for", made)
        return made

    return install


@pytest.fixture
def own(tmp_path):
    """A run that nearly fills a card."""
    return run_of(tmp_path, "model.seq_len=2048", preset="qwen2.5-0.5b", batch=32)


def test_a_search_is_confirmed_by_the_compiler(own, asked, capsys, tmp_path):
    """The fastest ways are asked about, until one fits."""
    wanted = command.Wanted(on="gpu:h100x1", search=True)
    assert command.plan_command(own, replace(wanted, quick=True)) == 0
    first = [line for line in capsys.readouterr().out.splitlines() if "analytic" in line]
    yes = asked(1000 * GIB)
    assert command.plan_command(own, wanted) == 0
    out, err = capsys.readouterr()
    assert len(yes.runs) == 1 and "compiling 1, at most 4: " in err
    (row,) = (line for line in out.splitlines() if " compiler " in line)
    assert " 30.0  compiler" in row and row.endswith(": best")
    words = out.split("to run the best:\n")[1].splitlines()[0].split()
    assert load_run(tmp_path / "run.toml", ["model.seq_len=2048", *words]) == yes.runs[0]
    assert Quick.of(yes.runs[0], H100).step_s <= min(float(line.split()[1]) for line in first) * 1.1
    # none fits: asked about no more than the finalists
    no = asked(0)
    assert command.plan_command(own, replace(wanted, finalists=2)) == 0
    out = capsys.readouterr().out
    assert len(no.runs) == 2 and "does not fit by 60.0 GiB" in out
    assert not any(" compiler " in line and "best" in line for line in out.splitlines())
    limit = H100.usable_bytes * (1 + MEMORY_ERROR_SHARE)
    assert all(Quick.of(run, H100).memory.peak <= limit for run in no.runs)
    no = asked(0)
    assert command.plan_command(own, replace(wanted, quick=True)) == 0 and not no.runs


def test_the_longest_rows_are_confirmed_by_the_compiler(own, asked, capsys):
    """Where the compiler refuses what was estimated, shorter rows and other options follow."""
    own = replace(own, train=replace(own.train, remat="none"))
    estimated = longest.Longest.of(own, H100)
    most = max(option.tokens for option in estimated.options)
    yes = asked(1000 * GIB)
    wanted = command.Wanted(on="gpu:h100x1", longest=True)
    assert command.plan_command(own, wanted) == 0
    out, err = capsys.readouterr()
    assert yes.runs[0].data.pack.seq_len == most and len(yes.runs) <= 2
    assert f"compiling rows of {most:,} tokens" in err
    assert out.count("  compiler  ") == 1 and "no compiler was asked" not in out
    no = asked(0.6 * H100.usable_bytes)
    assert command.plan_command(own, wanted) == 0
    best = int(capsys.readouterr().out.split("data.pack.seq_len=")[1].split()[0])
    assert best < most and 2 < len(no.runs) < 12
    assert all(run not in no.runs[:i] for i, run in enumerate(no.runs))
    assert command.plan_command(own, replace(wanted, quick=True)) == 0
    assert "no compiler was asked" in capsys.readouterr().out


def test_the_interval_around_a_step_widens_with_attention(tmp_path):
    """Packed rows count as one document each; steps were measured on one kind of card."""
    found = []
    for tokens, rows in ((2048, 8), (8192, 2)):
        words = (f"model.seq_len={tokens}", "train.remat=none")
        run = run_of(tmp_path, *words, preset="llama-135m", batch=rows)
        share = {n: Quick.of(run, parse_machine(f"gpu:{n}x1")).error_share for n in GPUS}
        assert 0.25 < share["h100"] < 0.75 <= min(share["a100"], share["l4"])
        found.append(share["h100"])
    assert found[0] < 0.45 < found[1]


def test_a_ring_holds_scores(tmp_path):
    """The kernels see whole rows, so a ring over `context` goes by chunks of queries."""
    words = ("model.seq_len=4096", "mesh.context=2", "mesh.fsdp=4", "model.num_heads=4")
    run = run_of(tmp_path, *words, "model.num_kv_heads=2", preset="llama-135m", batch=8)
    traded = replace(run, train=replace(run.train, context_attention="all_to_all"))
    ring, whole = (
        layer_bytes(Quick.of(r, parse_machine("gpu:h100x8")).layouts[0]) for r in (run, traded)
    )
    # three times the float32 scores of 512 queries of a row, in 4 heads
    assert ring - whole == 3 * 4 * 4 * 512 * 4096


def test_options_of_gpus_are_refused_where_they_have_no_effect(tmp_path):
    option = "train.compiler_options.xla_gpu_deterministic_ops='True'"
    run = run_of(tmp_path, option, preset="llama-135m", batch=8)
    assert Quick.of(run, H100).fits
    for name in ("cpu:8", "v5e-8"):
        with pytest.raises(UserError, match="xla_gpu_deterministic_ops: is for GPUs"):
            Quick.of(run, parse_machine(name))
    plan = resolve(run, jax.devices()[:1])  # as `export` and `eval` do for a run of a GPU
    with pytest.raises(UserError, match="xla_gpu_deterministic_ops: is for GPUs, not cpu"):
        refuse_options(run, plan.devices[0].platform)


def test_8_bit_floats_are_planned_where_they_are(tmp_path):
    run = run_of(tmp_path, "train.precision=fp8", preset="llama-135m", batch=8)
    wide = replace(run, train=replace(run.train, precision="bf16"))
    assert remat.settled(run, H100).run.train.remat in REMATS
    assert Quick.of(run, H100).memory == Quick.of(wide, H100).memory
    for name, told in (("gpu:a100x1", "gpu:a100x1"), ("v5e-8", "TPU v5")):
        with pytest.raises(UserError, match=f"{told}.* does not multiply 'fp8'"):
            Quick.of(run, parse_machine(name))


@pytest.mark.parametrize("name", GPUS)
def test_kernels_are_lowered_for_cards_that_pallas_does_not_list(name):
    """JAX 0.11 and later look the card up, or the one that is there."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    card, x = GPUS[name], jax.ShapeDtypeStruct((16,), "float32")
    add = pl.pallas_call(kernel, out_shape=x, compiler_params=triton.CompilerParams())
    mesh = jax.sharding.AbstractMesh(
        (1,), ("one",), abstract_device=jax.sharding.AbstractDevice(
            card.device_kind, card.card.cores, "gpu")
    )  # fmt: skip
    with (
        jax.sharding.use_abstract_mesh(mesh),
        gpu.as_default_device(parse_machine(f"gpu:{name}x1")),
    ):
        text = jax.jit(add).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
