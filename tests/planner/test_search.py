"""Search, --on any and cures: tables that say why, and a compiler that may be interrupted."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner import command, search
from lmwright.planner.advice import TIE_SHARE
from lmwright.planner.analytic.candidates import candidates
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.command import Wanted, plan_command
from lmwright.planner.compare import compare, compare_lines
from lmwright.planner.compiler.compile import Compiled
from lmwright.planner.compiler.cost import Estimate
from lmwright.planner.cost import cost_of
from lmwright.planner.search import Entry, Search
from lmwright.planner.suggestions import larger, single_changes, suggest
from tests.planner.runs import SMALL, run_of

GIB = 2**30


def test_the_table_says_why_each_lost(tmp_path):
    found = Search.of(run_of(tmp_path), parse_machine("v4-32"))
    ranked = found.ranked()
    assert found.reason(ranked[0], ranked[0]) == "best"
    reasons = {found.reason(entry, ranked[0]).split(":")[0] for entry in ranked[1:]}
    assert "a tie" in reasons
    assert any(reason.endswith("% slower") for reason in reasons)
    assert any(reason.startswith("does not fit by") for reason in reasons)
    for entry in ranked[1:]:
        if found.reason(entry, ranked[0]) == "a tie":
            assert entry.step_s / ranked[0].step_s == pytest.approx(1, abs=search.TIE_SHARE)
    text = found.lines()
    pasted = text[text.index("to run the best:") + 1].split()
    assert load_run(tmp_path / "run.toml", pasted) == ranked[0].candidate.run
    rows = json.loads(found.to_json())["candidates"]
    assert len(rows) == len(ranked) and rows[0]["reason"] == "best"


def test_small_steps_and_sizes_are_told_in_small_units(tmp_path):
    small = (*SMALL, "model.num_layers=1", "data.pack.seq_len=64")
    run = run_of(tmp_path, *small, batch=8)
    text = Search.of(run, parse_machine("v5e-8")).lines()
    assert text[2].split()[:3] == ["step", "ms", "MiB"]
    best = text[3].split()
    assert float(best[1]) > 0 and float(best[2]) > 0
    assert not any("+0.000 s" in line for line in text)


class Compiler:
    """Stands in for the compiler: what comes of the n-th program it is given."""

    def __init__(self, *outcomes):
        self.outcomes, self.runs = list(outcomes), []

    def __call__(self, run, where, *, timeout_s):
        self.runs.append(run)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return Compiled(
            slice=where.name, mesh={"fsdp": 16}, num_params=1, tokens_per_step=1,
            flops_per_step=1.0, weights_bytes=GIB, optimizer_bytes=GIB, lower_s=1.0,
            compile_s=1.0, fits=outcome > 0, peak_bytes=20 * GIB if outcome > 0 else 40 * GIB,
            hlo="x" * outcome,
        )  # fmt: skip


@pytest.fixture
def compiler(monkeypatch):
    """Installs a Compiler; its outcome n is a step of n seconds, 0 one that does not fit."""

    def install(*outcomes):
        stand_in = Compiler(*outcomes)
        monkeypatch.setattr(search, "compile_for", stand_in)
        monkeypatch.setattr(search, "require_libtpu", lambda: None)

        def took(report):
            if not report.compiled.hlo:
                return None
            found, seconds = Estimate(), len(report.compiled.hlo)
            found.spend("mlp", "matmul", seconds - 0.001)
            found.spend("mlp", f"only in the one of {seconds} s", 0.001)
            return found

        monkeypatch.setattr(search.Report, "estimate", property(took))
        return stand_in

    return install


def test_the_compiler_has_the_last_word(tmp_path, compiler, capsys):
    stand_in = compiler(4, 0, 3, UserError("v4-32: the compiler took longer than 900 s"))
    run = run_of(tmp_path)
    assert plan_command(run, Wanted(on="v4-32", search=True)) == 0
    out, err = capsys.readouterr()
    assert err.count("compiling ") == 4 and "compiling 4 of 4" in err
    rows = [line for line in out.splitlines() if " compiler " in line]
    assert "3.000" in rows[0] and rows[0].endswith("best")
    assert "33% slower: matmul +1.000 s" in rows[1]
    assert stand_in.runs[2] == load_run(
        tmp_path / "run.toml", out.split("to run the best:\n")[1].splitlines()[0].split()
    )


def test_more_are_asked_where_none_fits(tmp_path, compiler, capsys):
    compiler(0, 0, 5)
    wanted = Wanted(on="v4-32", search=True, finalists=2)
    assert plan_command(run_of(tmp_path), wanted) == 0
    out, err = capsys.readouterr()
    assert "compiling another, as none fits" in err and err.count("compiling") == 3
    assert "5.000" in out.split("microbatches\n")[1].splitlines()[0]


def test_what_is_known_is_printed_on_interruption(tmp_path, compiler, capsys):
    compiler(2, KeyboardInterrupt())
    wanted = Wanted(on="v4-32", search=True, finalists=3, out=str(tmp_path / "out"))
    assert plan_command(run_of(tmp_path), wanted) == EXIT_INTERRUPTED
    out = capsys.readouterr().out
    assert "interrupted" in out and "2.000" in out and "to run the best:" in out
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["candidates"]


def test_a_batch_that_no_mesh_divides(tmp_path):
    with pytest.raises(UserError, match=r"no mesh over 16 devices divides .* = 7"):
        Search.of(run_of(tmp_path, batch=7), parse_machine("v4-32"))


def test_any_compares_machines_cheapest_first(tmp_path):
    names = ("v4-32", "v5e-1", "v6e-8", "gpu:b200x8", "v5e-16")
    run = run_of(tmp_path)
    found = compare(run, names=names)
    assert [c.name for c in found if not c.fits] == ["v5e-1"]
    usd = [c.cost.usd for c in found if c.fits]
    assert usd[:-1] == sorted(usd[:-1]) and usd[-1] is None  # no price for the last
    text = "\n".join(compare_lines(run, found))
    assert "does not fit a device: v5e-1 (by " in text and "no price" in text
    timed = compare_lines(run, compare(run, names=names, hours=0.001))
    assert "in 0.001 h" in timed[2] and " 0% " in timed[3]
    dear = compare(run_of(tmp_path, "plan.prices.v6e=100"), names=names)
    assert dear[0].name != "v6e-8" and "plan.prices" in "\n".join(compare_lines(run, dear))


def test_cures_fit_and_paste(tmp_path):
    run = run_of(tmp_path, "train.remat=block")
    machine = parse_machine("v5e-8")
    text = "\n".join(suggest(run, machine).lines)
    assert "train.num_microbatches=2 (trains identically, no slower): " in text
    for line in text.splitlines():
        if line.startswith("  ") and " (trains" in line:
            words = line.split(" (")[0].split()
            new = load_run(tmp_path / "run.toml", words)
            assert command.Quick.of(new, machine).fits


def test_fewer_bits_of_block_inputs_are_offered_last(tmp_path):
    """Where nothing that trains identically fits: the least of them that does."""
    run = run_of(tmp_path, "train.remat=block", "train.num_microbatches=1", batch=1)
    machine = parse_machine("v5e-1")
    alone = Quick.of(run, machine).memory
    packed = replace(run, train=replace(run.train, block_inputs="int12"))
    saved = Quick.of(packed, machine).memory
    assert saved.saved == pytest.approx(alone.saved * 12.25 / 16)
    between = replace(machine, usable_bytes=int((alone.peak + saved.peak) / 2))
    changes = list(single_changes(run, between, lambda way: way.quick.fits))
    assert changes[-1].overrides == ("train.block_inputs=int12",)
    assert changes[-1].changes_training and changes[-1].quick.fits
    lines = suggest(run, between).lines
    assert any("train.block_inputs=int12 (trains differently): " in line for line in lines)
    assert "block inputs int12*" in changes[-1].label
    quick = changes[-1].quick
    cost = cost_of(quick.run, between, quick.step_s, quick.plan.tokens_per_step)
    assert "block inputs in int12, which changes gradients" in "\n".join(quick.lines(cost))


def test_suggestions_are_in_the_order_of_harm(tmp_path):
    """What is exact and free, what is exact and takes time, what trains differently."""
    sizes = "model.num_layers=10", "train.remat=none"
    run = run_of(tmp_path, *sizes, preset="llama-8b", batch=16)
    machine = parse_machine("v5e-8")
    text = suggest(run, machine).lines
    marks = [line.partition(" (")[2].partition(")")[0] for line in text if "(trains" in line]
    order = [2 if "differently" in mark else "slower" in mark and "no" not in mark
             for mark in marks]  # fmt: skip
    assert order == sorted(order) and len(order) > 1
    best = suggest(run, machine).best
    every = [c for c in candidates(run, machine, optimizers=True) if c.quick.fits]
    assert min(c.harm for c in every) == best.harm < 2
    given = command.Quick.of(run, machine).step_s
    for candidate in every:
        assert candidate.slower == pytest.approx(candidate.quick.step_s / given - 1)
        exact = candidate.run.optim.kind == run.optim.kind
        slow = candidate.quick.step_s > (1 + search.TIE_SHARE) * given
        assert candidate.harm == (int(slow) if exact else 2)


def test_adapters_are_offered_where_nothing_else_fits(tmp_path):
    """Of weights that are there already, and marked as what trains differently."""
    given = run_of(tmp_path, preset="llama-3b", batch=8)
    machine = parse_machine("v5e:1x1")
    fresh = suggest(given, machine)
    assert "adapters" not in "\n".join(fresh.lines) and fresh.best.run.lora is None
    run = replace(given, train=replace(given.train, init_from="somewhere"))
    found = suggest(run, machine)
    words = found.best.overrides
    assert found.best.quick.fits and found.best.harm == 2 and "lora.rank=16" in words
    assert load_run(tmp_path / "run.toml", words).lora == found.best.run.lora
    text = "\n".join(found.lines)
    assert "with a frozen model and adapters beside it:" in text and "smallest v5e" in text
    parts = command.Quick.of(run, machine)
    advice = command.too_large(parts.memory.parts(), parts.limit_bytes, parts, found.best)
    assert "lora.rank=16" in advice.text and "(trains differently), which fits" in advice.text


def test_adapters_are_offered_beside_what_fits(tmp_path):
    """An 8B on v5e-8, where moments on the host fit too and take longer."""
    given = run_of(tmp_path, "data.pack.seq_len=2048", preset="llama-8b", batch=16)
    machine = parse_machine("v5e-8")
    run = replace(given, train=replace(given.train, init_from="somewhere"))
    lines = suggest(run, machine).lines
    assert "adapters" not in "\n".join(suggest(given, machine).lines)
    at = lines.index("  with a frozen model and adapters beside it:")
    assert "optim.offload=moments" in "".join(lines[:at])
    words = ["data.pack.seq_len=2048", *lines[at + 1].split(" (")[0].split()]
    assert "lora.rank=16" in words
    assert command.Quick.of(load_run(tmp_path / "run.toml", words), machine).fits


def test_nothing_fits_by_less_than_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(command.Quick, "is_close", property(lambda self: True))
    run = run_of(tmp_path, preset="600b", batch=1024)
    (told,) = [x for x in suggest(run, parse_machine("v4-32")).lines if "nothing does" in x]
    assert told.endswith(" GiB; close, ask the compiler")


def test_the_smallest_slice_that_trains_it(tmp_path):
    run = run_of(tmp_path, preset="600b", batch=1024)
    text = "\n".join(suggest(run, parse_machine("v4-32"), 720).lines)
    assert "on v4-32 nothing does" in text
    assert re.search(r"the smallest v4 that trains it is (\dx)?v4-", text)
    assert "720 hours: " in text and "chip-hours" in text


def test_larger_machines_of_a_kind():
    assert list(larger(parse_machine("v5e-64")))[:3] == ["v5e-128", "v5e-256", "2xv5e-256"]
    assert next(larger(parse_machine("gpu:h100x8"))) == "gpu:h100x16"
    assert list(larger(parse_machine("cpu:8"))) == []


def test_programs_with_the_host_or_chunks_get_more_time(tmp_path):
    given = run_of(tmp_path)
    long = "train.remat=block", "data.pack.seq_len=1024"
    for word in (
        "train.offload=block_inputs",
        "train.mlp_chunk_tokens=512",
        "optim.offload=moments",
    ):
        assert search.timeout_s(run_of(tmp_path, *long, word)) == 2 * search.timeout_s(given)


def test_the_compiler_is_given_that_time(tmp_path, monkeypatch):
    seconds = []

    def compiler(run, where, *, timeout_s):
        train = run.train
        seconds.append((train.mlp_chunk_tokens or train.offload != "none", timeout_s))
        raise UserError("no")

    monkeypatch.setattr(search, "require_libtpu", lambda: None)
    monkeypatch.setattr(search, "compile_for", compiler)
    run = run_of(tmp_path, preset="llama-8b", batch=8)
    found = Search.of(run, parse_machine("v5e-8"))
    found.ask(parse_slice("v5e-8"), 2)
    assert set(seconds) == {(4096, 1800), (True, 1800), (False, 900)}


def test_what_trains_differently_must_be_better_by_more_than_a_tie():
    def entry(name, step_s, differently):
        quick = SimpleNamespace(fits=True, step_s=step_s, compiled=None)
        return Entry(SimpleNamespace(name=name, quick=quick, changes_training=differently))

    for faster, first in ((0.5 * TIE_SHARE, "same"), (2 * TIE_SHARE, "other")):
        entries = [entry("other", 1 - faster, True), entry("same", 1.0, False)]
        assert Search(None, None, entries).ranked()[0].candidate.name == first
