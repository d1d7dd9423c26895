"""quantize by the command line: runs and folders as int4, int8 and Q4_0, read by others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import walk
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from tests.formats import llama_cpp
from tests.formats.unpacked import IDS, is_read_by_others
from tests.quantize.conftest import saved, trained
from tests.train.texts import MODEL

FEW = ["--rows", "4", "--context", "16"]
MIXTURE = MODEL.format(kind="mixtral").replace(
    "mlp_dim = 96", "experts = {num_experts = 4, experts_per_token = 2, mlp_dim = 32}"
)


@pytest.fixture(scope="module")
def floats(run):
    """The same model as a folder in bf16."""
    out = run.parent / "floats"
    assert main(["export", str(run), str(out), "--dtype", "bf16"]) == 0
    return out


def test_a_run_in_int4_is_read_by_others(run, tmp_path, capsys):
    out = tmp_path / "four"
    assert main(["quantize", str(run), str(out), "--group-size", "16", *FEW]) == 0
    told = capsys.readouterr().out
    assert "measured on 4 rows of 16 tokens of" in told and "KL 0." in told
    assert (
        "largest errors of results: model.layers." in told and "equal bit for bit in int4" in told
    )
    floats, back = load_model(run), load_model(out)
    is_read_by_others(out, back.model, back.weights, back.tensors)
    name = "model.layers.1.mlp.down_proj.weight"
    step = np.abs(floats.tensors[name]).max()
    assert 0 < np.abs(back.tensors[name] - floats.tensors[name]).max() < step
    np.testing.assert_array_equal(
        back.tensors["model.embed_tokens.weight"], floats.tensors["model.embed_tokens.weight"]
    )
    assert "Rounded to int4 with GPTQ by lmwright." in (out / "README.md").read_text()
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == 16


@pytest.mark.parametrize("to", ["q4_0", "iq4_nl"])
def test_a_file_gives_the_same_logits_in_llama_cpp(to, run, floats, tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    out = tmp_path / "m.gguf"
    text = run.parent.parent / "text.jsonl"
    assert main(["quantize", str(floats), str(out), "--text", str(text), "--to", to, *FEW]) == 0
    back = load_model(out)
    before = dict(walk(load_model(floats).weights))
    for path, leaf in walk(back.load(dtype=jnp.float32)):
        if "norm" in path:
            np.testing.assert_array_equal(leaf, np.asarray(before[path], "f4"))
    llama_cpp.needed()
    there = llama_cpp.logits(out, IDS[0])
    here = logits(back.model, back.load(dtype=jnp.float32), IDS)[0]
    # llama.cpp rounds what meets a matrix to 8 bits
    assert np.abs(here - there).max() < 0.05 * np.abs(there).max()


WIDE = MODEL.format(kind="llama").replace("embed_dim = 64", "embed_dim = 256")


@pytest.mark.parametrize("to", ["q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m"])
def test_k_quants_give_the_same_logits_in_llama_cpp(to, folder, tmp_path, capsys):
    """The matrices that read the stream are rounded, of 256 inputs; the others are Q8_0."""
    gguf = pytest.importorskip("gguf", reason="writes the file")
    run, out = folder / "wide" / "run", tmp_path / "m.gguf"
    if not run.exists():
        trained(folder, "wide", WIDE)
    capsys.readouterr()
    assert main(["quantize", str(run), str(out), "--to", to.upper(), *FEW]) == 0
    told = capsys.readouterr().out
    # attention's output [64, 256] and down [96, 256], of two layers
    assert "81,920 weights have rows that blocks of 256 do not divide: 8 bits (Q8_0)" in told
    kind, mixed = to.upper().removesuffix("_M"), to.endswith("_m")
    counts = f" 9 in {kind}, 1 in Q6_K, " if mixed else f" 10 in {kind}, "
    assert counts in told and " in F16" not in told
    back = load_model(out)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert kinds["blk.0.attn_q.weight"] == kind and kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.1.attn_v.weight"] == ("Q6_K" if mixed else kind)
    far, near = (logits(m.model, m.load(dtype=jnp.float32), IDS) for m in (load_model(run), back))
    most = {"Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.02}[kind]
    assert 0 < np.abs(near - far).max() < most * np.abs(far).max()
    llama_cpp.needed()
    there = llama_cpp.logits(out, IDS[0])
    assert np.abs(near[0] - there).max() < 0.05 * np.abs(there).max()


def test_what_is_not_rounded_stays_in_the_floats_dtype(run, floats, tmp_path):
    text, out = str(run.parent.parent / "text.jsonl"), tmp_path / "eight"
    assert main(["quantize", str(floats), str(out), "--to", "int8", "--text", text, *FEW]) == 0
    before, back = load_model(floats), load_model(out)
    kept = {
        name: back.tensors.described(name)[0]
        for name in ("model.embed_tokens.weight", "model.norm.weight")
    }
    assert set(kept.values()) == {"bfloat16"}
    is_read_by_others(out, back.model, back.load(dtype=jnp.float32), back.tensors)
    near = logits(back.model, back.load(dtype=jnp.float32), IDS)
    far = logits(before.model, before.load(dtype=jnp.float32), IDS)
    assert 0 < np.abs(near - far).max() < 0.02 * np.abs(far).max()


def test_experts_are_rounded_on_their_own_tokens(folder, tmp_path):
    run, out = trained(folder, "experts", MIXTURE), tmp_path / "four"
    command = ["quantize", str(run), str(out), "--group-size", "16", "--rows", "8"]
    assert main(command) == 0
    back = load_model(out)
    is_read_by_others(out, back.model, back.weights, back.tensors)
    near, far = (logits(m.model, m.weights, IDS) for m in (back, load_model(run)))
    assert 0 < np.abs(near - far).max() < 0.3 * np.abs(far).max()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["int4", "q4_0", "iq4_nl"])
def test_the_results_are_nearer_than_those_of_the_nearest_integers(
    to, shared_data, tmp_path, capsys
):
    """A real model of 260,032 parameters, on text that it was not measured on."""
    out = str(tmp_path / ("m" if to == "int4" else "m.gguf"))
    kl = {}
    for method in ("nearest", "gptq"):
        command = ["quantize", str(shared_data / "models" / "stories260k"), out, "--overwrite"]
        command += ["--text", str(shared_data / "text" / "books_a.parquet"), "--context", "256"]
        command += ["--method", method, "--to", to] + (
            ["--group-size", "4"] if to == "int4" else []
        )
        assert main(command) == 0
        kl[method] = float(capsys.readouterr().out.split("KL ")[1].split()[0])
    assert kl["gptq"] < 0.7 * kl["nearest"], kl


@pytest.mark.parametrize(
    "options, told",
    [
        (["m", "--to", "q4_0"], "--to: q4_0 is for a .gguf file, and OUT is"),
        (["m.gguf", "--to", "int8"], "--to: int8 is for a folder"),
        (["m.gguf", "--to", "q4_k"], "--to: q4_k rounds rows of a multiple of 256, and no matrix"),
        (["m", "--to", "int8", "--group-size", "8"], "--group-size: has no effect with --to int8"),
        (["m", "--group-size", "7"], "the 96 inputs of layers.down; use --group-size 6"),
        (["m", "--context", "400"], "--context: 400 must be from 2 to the model's 48"),
        (["m", "--text", "gone.txt"], "gone.txt"),
        (["m", "--text-column", "body"], "--text-column: has no effect without --text"),
        (["m", "--text", "{text}", "--text-column", "body"], "has 'body'"),
        (["m", "--text", "{short}"], "has 4 tokens, and at least two rows of 48 are needed"),
        (["there"], "is not empty and was not written by lmwright export"),
    ],
)  # fmt: skip
def test_one_sentence_for_what_cannot_be(options, told, run, tmp_path, capsys):
    text, short = run.parent.parent / "text.jsonl", tmp_path / "short.txt"
    short.write_text("the cat sat")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    words = [word.format(text=text, short=short) for word in options]
    before = sorted(tmp_path.rglob("*"))
    assert main(["quantize", str(run), str(tmp_path / words[0]), *words[1:]]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("lmwright: error: ") and told in said.err.replace("\n", " ")
    assert len(said.err.splitlines()) == 1 and not said.out
    assert sorted(tmp_path.rglob("*")) == before


def test_models_that_are_not_quantized(run, floats, folder, tmp_path, capsys):
    def refused(model, *options):
        capsys.readouterr()
        assert main(["quantize", str(model), str(tmp_path / "no"), *options]) == 2
        return capsys.readouterr().err

    assert "--text: missing; give a file of text" in refused(floats)
    out = tmp_path / "four"
    assert main(["quantize", str(run), str(out), *FEW]) == 0
    assert "holds integers already; start from the model in floats" in refused(out)
    rounded = saved(folder, "qat", MODEL.format(kind="llama"), 'qat.weights = "int8"')
    assert f"write them with lmwright export {rounded} OUT --dtype int8" in refused(rounded)
    ternary = saved(folder, "ternary", MODEL.format(kind="bitnet"))
    assert "the weights of a 'bitnet' model are ternary already" in refused(ternary)
    assert not (tmp_path / "no").exists()


def test_the_same_command_writes_the_same_weights(run, tmp_path):
    """Also from Python."""
    import lmwright.api as lm

    assert main(["quantize", str(run), str(tmp_path / "a"), *FEW]) == 0
    proof = lm.quantize(run, tmp_path / "b", rows=4, context=16)
    assert proof.dtype == "int4" and proof.tokens > 0
    first, second = (load_model(tmp_path / name).weights for name in "ab")
    jax.tree.map(np.testing.assert_array_equal, first, second)
