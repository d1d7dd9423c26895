"""Quantization-aware training by the command line: trained and resumed, exported as floats, Q4_0
and compressed-tensors that hold the very values, with adapters inside the rounding."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import walk
from lmwright.core.rounding import GRIDS
from lmwright.errors import UserError
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from lmwright.formats.safetensors import TensorFiles
from tests.formats.unpacked import is_read_by_others
from tests.train.texts import MODEL, PLAIN, STEADY, write_run, write_texts

MIXTURE = MODEL.format(kind="mixtral").replace(
    "mlp_dim = 96", "experts = {num_experts = 4, experts_per_token = 2, mlp_dim = 32}"
)
LATENTS = (
    MODEL.replace("num_kv_heads = 2", "num_kv_heads = 4")
    + """kv_lora_rank = 32
qk_rope_head_dim = 8
v_head_dim = 16
experts = {{num_experts = 4, experts_per_token = 2, mlp_dim = 32, shared_dim = 32, shares = "all"}}
"""
)
STACKED = MODEL.replace(
    "mlp_dim = 96",
    'experts = {{num_experts = 4, experts_per_token = 2, mlp_dim = 32, bias = "all"}}',
)
EACH = (
    MODEL
    + """window = 16
layer_pattern = ["local", "global"]
experts = {{num_experts = 4, experts_per_token = 2, mlp_dim = 32}}
"""
)
IDS = np.random.default_rng(0).integers(0, 320, (1, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder of prepared data for all runs."""
    folder = tmp_path_factory.mktemp("qat")
    write_texts(folder / "data.jsonl")
    assert main(["prepare", write(folder / "a", folder / "data")]) == 0
    return folder / "data"


def write(folder, data, weights="q4_0", top="", train="", kind="llama", model=MODEL):
    folder.mkdir(exist_ok=True)
    return write_run(
        folder, model.format(kind=kind), top=f'qat.weights = "{weights}"\n{top}', data=data,
        source=f'sources = [{{path = "{data}.jsonl"}}]', train=PLAIN + train,
        more=STEADY.format(rate=1e-2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def q4(data):
    """Run directory with weights on GGUF's grid."""
    assert main(["train", write(data.parent / "q4", data)]) == 0
    return str(data.parent / "q4" / "run")


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits(q4, data, tmp_path):
    path = write(tmp_path / "twice", data)
    assert main(["train", path, "train.steps=2"]) == main(["train", path]) == 0
    both = [load_model(place).weights for place in (q4, str(tmp_path / "twice" / "run"))]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_a_file_holds_the_trained_values(q4, tmp_path, record_property):
    gguf = pytest.importorskip("gguf")
    out = str(tmp_path / "m.gguf")
    assert main(["export", q4, out, "--dtype", "q4_0"]) == 0
    trained, back = load_model(q4), load_model(out)
    assert back.model == trained.model
    for path, leaf in walk(trained.weights):
        same = path != "embed"  # which is F16
        read = np.asarray(dict(walk(back.weights))[path])
        np.testing.assert_allclose(read, leaf, rtol=0 if same else 1e-3, atol=0 if same else 1e-5)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert kinds["blk.1.ffn_down.weight"] == "Q4_0" and kinds["token_embd.weight"] == "F16"


def test_transformers_reads_the_file(q4, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is the reference")
    transformers = pytest.importorskip("transformers")
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    assert main(["export", q4, str(tmp_path / "m.gguf"), "--dtype", "q4_0"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=str(tmp_path / "m.gguf"), dtype=torch.float32
    )
    ours = load_model(tmp_path / "m.gguf")
    with torch.no_grad():
        there = theirs.eval()(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
    here = logits(ours.model, ours.load(dtype=jnp.float32), IDS)
    np.testing.assert_allclose(here, there, atol=1e-5 * np.abs(there).max())
    state, trained = theirs.state_dict(), load_model(q4).tensors
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        np.testing.assert_array_equal(state[name].numpy(), trained[name])


def test_the_unquantized_folder_has_the_trained_numbers(q4, tmp_path, capsys):
    out = tmp_path / "floats"
    assert main(["export", q4, str(out)]) == 0
    jax.tree.map(np.testing.assert_array_equal, load_model(out).weights, load_model(q4).weights)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    capsys.readouterr()
    for name, dtype, told in (
        ("m", "int4", 'they were trained with "q4_0"'),
        ("m.gguf", "tq2_0", "has none"),
        ("m.gguf", "q8_0", 'would round weights again that were trained with "q4_0"'),
    ):
        assert main(["export", q4, str(tmp_path / name), "--dtype", dtype]) == 2
        assert told in capsys.readouterr().err
    assert main(["export", str(out), str(tmp_path / "m.gguf"), "--dtype", "q4_0"]) == 2
    assert "they were trained as floats" in capsys.readouterr().err
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    "weights, group, top",
    [
        ("int4", 16, "qat.group_size = 16"),
        pytest.param("int8", 0, 'qat.activations = "int8"', marks=pytest.mark.slow),
    ],
)
def test_compressed_tensors_hold_the_trained_values(weights, group, top, data, tmp_path):
    """Unpacked here by the notes of the format, and by its own package where it is installed."""
    path = write(tmp_path / "a", data, weights, top)
    assert main(["train", path, "train.steps=2"]) == 0
    run, out = str(tmp_path / "a" / "run"), tmp_path / "packed"
    assert main(["export", run, str(out), "--dtype", weights]) == 0
    trained, back = load_model(run), load_model(out)
    jax.tree.map(np.testing.assert_array_equal, back.weights, trained.weights)
    files, bits = TensorFiles(out), {"int4": 4, "int8": 8}[weights]
    name = "model.layers.1.mlp.down_proj.weight"
    words = files[f"{name}_packed"].view(np.uint32)
    first = (words[:, 0] & (2**bits - 1)).astype(int) - 2 ** (bits - 1)
    second = ((words[:, 0] >> bits) & (2**bits - 1)).astype(int) - 2 ** (bits - 1)
    scale = files[f"{name}_scale"]
    assert scale.shape == (64, 96 // (group or 96)) and words.shape == (64, 96 * bits // 32)
    np.testing.assert_array_equal(files[f"{name}_shape"], [64, 96])
    dense = np.asarray(trained.tensors[name])
    np.testing.assert_array_equal(dense[:, 0], first.astype("f4") * scale[:, 0])
    np.testing.assert_array_equal(dense[:, 1], second.astype("f4") * scale[:, 0])
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["format"] == "pack-quantized" and said["ignore"] == ["lm_head"]
    with pytest.raises(UserError, match="not packed again; copy that folder, or export the run"):
        export_command(out, tmp_path / "again", dtype=weights)
    is_read_by_others(out, trained.model, trained.weights, trained.tensors)


@pytest.mark.parametrize(
    ("kind", "model", "weights", "told"),
    [
        ("fanformer", MODEL, "q4_0", "FanformerForCausalLM: has no GGUF form here"),
        ("deepseek-v2", LATENTS, "q4_0", "q4_0 is not written for a 'deepseek-v2' model"),
        ("gpt-oss", STACKED, "int8", "'int8' is not written for gpt-oss, whose .*; use 'q4_0', wh"),
        ("gemma4-moe", EACH, "int8", "'int8' is not written for Gemma 4 .*; no other is, either"),
        ("gemma4-moe", EACH, "q4_0", "GGUF files of a Gemma 4 with experts are neither read nor"),
    ],
)
def test_what_no_file_can_hold_is_not_trained(kind, model, weights, told, data, tmp_path, capsys):
    run = write(tmp_path / "a", data, weights, kind=kind, model=model)
    assert main(["train", run]) == 2
    assert re.search(f"qat.weights: {told}", capsys.readouterr().err)
    assert not (tmp_path / "a" / "run").exists()


@pytest.mark.slow
def test_an_adapter_inside_the_rounding(q4, data, tmp_path, capsys):
    """LR-QAT: the file of the merged model holds what was trained, and the base stays."""
    path = write(
        tmp_path / "b", data, top='lora = {rank = 4, base = "fp32"}',
        train=f'init_from = "{q4}"',
    )  # fmt: skip
    own = [f"data.tokenizer.path={data}/tokenizer", f"data.dir={tmp_path}/data"]
    assert main(["prepare", path, *own]) == 0
    for change, told in (
        ("lora.dropout=0.1", "the adapter is inside the rounding"),
        ("lora.base=int4", "the adapter is inside the rounding"),
    ):
        assert main(["train", path, *own, change]) == 2
        assert told in capsys.readouterr().err
    assert main(["train", path, *own]) == 0
    run, out = str(tmp_path / "b" / "run"), str(tmp_path / "m.gguf")
    assert main(["export", run, out, "--dtype", "q4_0"]) == 0
    trained, back = load_model(run), load_model(out)
    before, moved = dict(walk(load_model(q4).weights)), 0
    for path, leaf in walk(trained.weights):
        if path != "embed":
            np.testing.assert_array_equal(np.asarray(dict(walk(back.weights))[path]), leaf)
        moved += int((np.asarray(leaf) != before[path]).sum())
    assert moved > 100
    capsys.readouterr()
    assert main(["adapters", "export", run, str(tmp_path / "peft")]) == 2
    assert "rounded its adapter with its base" in capsys.readouterr().err


@pytest.mark.slow
def test_experts_and_adapters_of_them(data, tmp_path):
    """Files hold what was trained, with and without adapters, which change all experts that got
    tokens."""
    folders = [tmp_path / "a", tmp_path / "b"]
    model = MIXTURE.replace("{", "{{").replace("}", "}}")
    plain = write(folders[0], data, model=model)
    lora = write(
        folders[1], data, top='lora = {rank = 4, base = "fp32"}', model=model,
        train=f'init_from = "{folders[0]}/run"',
    )  # fmt: skip
    own = [f"data.tokenizer.path={data}/tokenizer", f"data.dir={tmp_path}/data"]
    assert main(["prepare", lora, *own]) == 0
    assert main(["train", plain]) == main(["train", lora, *own]) == 0
    seen = []
    for folder in folders:
        out = f"{folder}.gguf"
        assert main(["export", str(folder / "run"), out, "--dtype", "q4_0"]) == 0
        trained = dict(walk(load_model(folder / "run").weights))
        read = dict(walk(load_model(out).weights))
        for path, leaf in trained.items():
            if path not in ("embed", "head"):
                np.testing.assert_array_equal(np.asarray(read[path]), leaf)
        seen.append(trained)
    before, after = seen
    for name in ("gate", "up", "down"):
        path = f"layers.expert_{name}"
        assert (before[path] != after[path]).any(axis=(2, 3)).sum() >= 6, path  # of 8
    np.testing.assert_array_equal(before["layers.router"], after["layers.router"])


@pytest.mark.parametrize(
    "weights, top, kind, told",
    [
        (
            "int4",
            "qat.group_size = 24",
            "llama",
            "qat.group_size: groups of 24 do not divide the 64",
        ),
        ("int8", "qat.group_size = 32", "llama", "qat.group_size: has no effect with qat.weights"),
        ("int4", "", "bitnet", "qat: the weights of a 'bitnet' model are ternary already"),
    ],
)
def test_what_is_refused(weights, top, kind, told, data, tmp_path, capsys):
    """Before the data is prepared, too."""
    file = write(tmp_path / "a", data, weights, top, kind=kind)
    for words in (["prepare", file, f"data.dir={tmp_path}/data"], ["train", file]):
        assert main(words) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "a" / "run" / "checkpoints").exists()


def test_the_grids_of_the_section_are_those_of_the_products():
    assert set(GRIDS) == {"int4", "int8", "q4_0"}


def test_the_example_is_planned(capsys):
    example = Path(__file__).parents[2] / "examples" / "qat.toml"
    assert main(["plan", str(example), "--on", "v5e-16", "--quick"]) == 0
    assert "1,235,814,400" in capsys.readouterr().out
