"""`plan --longest`: the estimate, and a compiler that agrees, disagrees or says nothing."""

import json
from dataclasses import replace

import pytest

from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner import longest
from lmwright.planner.analytic.candidates import is_legal
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.compile import Compiled
from lmwright.planner.longest import Longest
from tests.planner.runs import run_of

GIB = 2**30
WORDS = "train.remat=none", "model.seq_len=2048"
V5E = parse_machine("v5e-8")


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, *WORDS, preset="qwen2.5-0.5b", batch=64)


def test_the_answer_fits_and_twice_it_does_not(run, tmp_path):
    found = Longest.of(run, V5E)
    lengths = {found.label(option): option.tokens for option in found.options}
    assert len(lengths) == len(found.options) == 10
    for option in found.options:
        tokens = option.tokens
        words = [*WORDS, *option.length_words(tokens)]
        assert load_run(tmp_path / "run.toml", words) == option.run_at(tokens)
        assert Quick.of(option.run_at(tokens), V5E).fits
        if tokens == longest.MOST_TOKENS:
            assert option.refused is None
            continue
        assert not Quick.of(option.run_at(2 * tokens), V5E).fits
        assert option.refused.tokens == 2 * tokens and " of 15.75 GiB" in option.refused.refusal
    whole = [lengths[label] for label in lengths if "mesh" not in label]
    assert whole == sorted(whole) and whole[-1] > 4 * whole[0]
    over = lengths["mesh.fsdp=1 mesh.context=8"]
    assert over >= 4 * lengths["as set"]  # rows in eight pieces, less what is whole


def test_a_step_has_one_row_for_each_shard(run):
    for option in Longest.of(run, V5E).options:
        train = option.run_at(option.tokens).train
        rows = 1 if option.mesh.context == 8 else 8
        assert (train.global_batch_size, train.num_microbatches) == (rows, 1)
        tokens = option.run_at(1024)  # no longer than a chunk
        assert tokens.train.mlp_chunk_tokens is None


def test_adapters_have_as_many_rows_each(tmp_path):
    three = "lora.adapters=[{name='a'}, {name='b'}, {name='c'}]"
    run = run_of(tmp_path, *WORDS, "lora.rank=4", three, preset="qwen2.5-0.5b", batch=24)
    for machine, rows in ((V5E, 24), (parse_machine("v5e-1"), 3)):
        option = Longest.of(run, machine).options[0]
        assert option.run_at(option.tokens).train.global_batch_size == rows
    first = replace(run.lora.adapters[0], rows=8)
    lora = replace(run.lora, adapters=(first, *run.lora.adapters[1:]))
    with pytest.raises(UserError, match=r"--longest: takes as few rows as it can, and lora\.adap"):
        Longest.of(replace(run, lora=lora), V5E)


class Compiler:
    """Stands in for the compiler: takes rows of at most so many tokens."""

    def __init__(self, most, fails=()):
        self.most, self.fails, self.asked = most, fails, []

    def __call__(self, run, where, *, timeout_s):
        tokens = run.data.pack.seq_len
        self.asked.append(tokens)
        if tokens in self.fails:
            raise UserError("v5e-8: the compiler took longer than 1800 s")
        fits = tokens <= self.most
        return Compiled(
            slice=where.name, mesh={"fsdp": 8}, num_params=1, tokens_per_step=1,
            flops_per_step=1.0, weights_bytes=GIB, optimizer_bytes=GIB, lower_s=1.0,
            compile_s=1.0, fits=fits, peak_bytes=(12 if fits else 20) * GIB,
        )  # fmt: skip


@pytest.fixture
def compiler(monkeypatch):
    def install(*args, **kwargs):
        made = Compiler(*args, **kwargs)
        monkeypatch.setattr(longest, "compile_for", made)
        return made

    return install


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_the_compiler_has_the_last_word(run, compiler, off):
    found = Longest.of(run, V5E)
    first = found.options[0]
    estimated = first.tokens
    truth = estimated * 2**off if off >= 0 else estimated // 2**-off
    made = compiler(truth)
    first.confirm(parse_slice("v5e-8"))
    assert first.tokens == truth and first.refused.tokens == 2 * truth
    assert made.asked[0] == estimated and len(made.asked) == len(set(made.asked))
    assert len(made.asked) == 2 + abs(off) - (off < 0)
    assert first.refused.refusal == "20.00 of 15.75 GiB"


def test_the_run_as_set_and_the_longest_are_compiled(run, compiler):
    found = Longest.of(run, V5E)
    made = compiler(10**9)
    found.ask(parse_slice("v5e-8"), 2)
    asked = [option for option in found.options if option.compiled]
    longest_estimated = max(option.estimated_tokens for option in found.options)
    assert asked[0] is found.options[0] and asked[1].estimated_tokens == longest_estimated
    assert max(made.asked) == longest.MOST_TOKENS  # a compiler that takes all is not asked forever
    assert found.best in asked and found.best.refused is None


def test_a_compiler_that_says_nothing_is_quoted(run, compiler):
    found = Longest.of(run, V5E)
    first = found.options[0]
    compiler(10**9, fails=(2 * first.tokens,))
    tokens = first.tokens
    first.confirm(parse_slice("v5e-8"))
    assert first.tokens == tokens
    assert first.refused.refusal.startswith("no answer: v5e-8: the compiler took longer")


def test_where_nothing_fits(tmp_path):
    run = run_of(tmp_path, preset="llama-70b", batch=8)
    found = Longest.of(run, V5E)
    assert not found.fits and found.lines()[-1] == "no row fits"
    assert " of 15.75 GiB" in found.lines()[3]


@pytest.mark.parametrize("offload", ["block_inputs", "products"])
def test_what_is_offered_is_a_run_that_train_takes(run, offload):
    """Chunks of an mlp have no effect where its products are on the host."""
    run = replace(run, train=replace(run.train, remat="block", offload=offload))
    options = Longest.of(run, V5E).options
    assert all(is_legal(option.run_at(longest.CHUNK_TOKENS * 4)) for option in options)
    chunked = {option.train.mlp_chunk_tokens is not None for option in options}
    assert chunked == ({False, True} if offload == "block_inputs" else {False})


def test_a_mesh_over_slices_and_tensor(run):
    """`data` takes the slices, `tensor` stays, and `context` takes the rest."""
    run = replace(run, mesh=replace(run.mesh, tensor=2))
    found = Longest.of(run, parse_machine("2xv5e-8"))
    meshes = {option.mesh for option in found.options}
    expected = replace(run.mesh, data=2, fsdp=1, context=4, expert=1, stage=1)
    assert [mesh for mesh in meshes if mesh.context > 1] == [expected]


def test_the_verb(run, tmp_path, capsys):
    words = ["plan", str(tmp_path / "run.toml"), *WORDS, "--on", "v5e-8", "--longest", "--quick"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "the longest rows that fit" in out and "no compiler was asked" in out
    assert "beyond the 2,048 tokens of model.seq_len" in out
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(option["by"] == "analytic" for option in answer["options"])
    most = max(option["tokens"] for option in answer["options"])
    assert f"data.pack.seq_len={most}" in answer["overrides"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--on", "v5e-8", "--search"], "--search"),
        (["--on", "v5e-8", "--quick", "--hours", "9"], "--hours"),
        (["--on", "v5e-8", "--quick", "--price", "1"], "--price"),
        (["--on", "v5e-8", "--quick", "--finalists", "2"], "--finalists"),
        (["--on", "any"], "one machine"),
        (["--on", "cpu"], "not known"),
        (["--measured"], "--longest"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, words, says):
    assert main(["plan", str(tmp_path / "run.toml"), "--longest", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
