"""Export: what transformers loads is the model; nothing is left of an export that fails."""

import json
import resource

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lmwright.config.run import Tokenizer
from lmwright.core.param import map_params, walk
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from lmwright.errors import UserError
from lmwright.formats import hf_write as writer
from lmwright.formats import reference
from lmwright.formats.card import Facts
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_read import import_hf
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.load import load_model
from lmwright.formats.safetensors import plan_shards
from lmwright.models.llama import Llama
from tests.in_memory import export_hf, to_hf

MODEL = Llama(
    vocab_size=331, embed_dim=24, mlp_dim=56, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=4, seq_len=48, rope_theta=4001.0, head="untied", bias="all",
)  # fmt: skip


def weights_of(model, seed=0):
    rng = np.random.default_rng(seed)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, model.spec())


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = ["Once upon a time there was a function that returned the number of bytes."] * 20
    save_tokenizer(train_tokenizer(text, Tokenizer(vocab_size=300)), folder)
    return folder


@pytest.fixture
def without_transformers(monkeypatch):
    """As on a machine that has no transformers: the proof says so."""
    find = reference.importlib.util.find_spec
    monkeypatch.setattr(
        reference.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir())


def test_layout_by_hand():
    """The rearrangement written once more, without arrows."""
    w = weights_of(MODEL)
    there = to_hf(MODEL, w)
    n, k, h, d = 6, 2, 4, 24
    for i in range(3):
        layer = {name: leaf[i] for name, leaf in w["layers"].items()}
        name = f"model.layers.{i}."
        q = there[name + "self_attn.q_proj.weight"]
        assert q.shape == (n * h, d)
        for head in range(n):
            for j in range(h):
                np.testing.assert_array_equal(q[head * h + j], layer["q"][:, head, j])
        np.testing.assert_array_equal(
            there[name + "self_attn.o_proj.weight"],
            np.einsum("nhd->dnh", layer["o"]).reshape(d, -1),
        )
        np.testing.assert_array_equal(
            there[name + "self_attn.v_proj.bias"], layer["v_bias"].reshape(k * h)
        )
        np.testing.assert_array_equal(there[name + "mlp.down_proj.weight"], layer["down"].T)
    np.testing.assert_array_equal(there["model.embed_tokens.weight"], w["embed"])
    np.testing.assert_array_equal(there["lm_head.weight"], w["head"].T)
    assert sum(a.size for a in there.values()) == sum(leaf.size for _, leaf in walk(w))
    jax.tree.map(np.testing.assert_array_equal, from_hf(MODEL, there), w)


def test_every_weight_of_the_spec_is_one_slot():
    covered = sum(slot.size for slot in slots(MODEL))
    assert covered == sum(p.size for _, p in walk(MODEL.spec()))
    assert len({slot.name for slot in slots(MODEL)}) == len(slots(MODEL))


def test_shards_are_full_but_not_over():
    sizes = [("a", 5), ("b", 6), ("c", 4), ("d", 50), ("e", 1), ("f", 1)]
    assert plan_shards(sizes, 10) == [["a"], ["b", "c"], ["d"], ["e", "f"]]


def test_sharded_bf16_export(tmp_path, tokenizer_dir):
    """transformers (in the proof, and here) reads the shards; values are those of bfloat16."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    w, out = weights_of(MODEL), tmp_path / "out"
    facts = Facts(
        name="ti\x1b[31mny\n<b>[x](y)",
        sources=({"source": "a|b", "tokens": 12345},),
        settings={"x": 1e-3},
    )
    found = export_hf(
        MODEL, w, tokenizer_dir, out, dtype="bf16", max_shard_bytes=20_000, facts=facts
    )
    assert leftovers(tmp_path) == ["out"]
    assert found.folder_to_transformers is not None, found.transformers
    assert found.folder_to_transformers.greedy_agreement == 1.0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3 and all(s.stat().st_size < 25_000 for s in shards)
    assert index["metadata"]["total_size"] == 2 * sum(leaf.size for _, leaf in walk(w))
    read = {k: v for shard in shards for k, v in load_file(shard).items()}
    for name, array in to_hf(MODEL, w).items():
        np.testing.assert_array_equal(read[name], array.astype(ml_dtypes.bfloat16))
    config = json.loads((out / "config.json").read_text())
    ids = load_tokenizer(tokenizer_dir)
    assert config["dtype"] == "bfloat16" and config["eos_token_id"] == ids.eos_id
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16
    assert theirs.generation_config.eos_token_id == ids.eos_id
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "a\\|b | 12,345" in card
    assert "# ti" in card and "](y)" not in card and "<b>" not in card
    assert 'from_pretrained("out")' in card and "lmwright generate out --prompt" in card
    assert "| reasoning |" not in card and "\x1b" not in card
    assert "License: not set" in card and f"transformers {transformers.__version__}" in card
    assert json.loads((out / "convert.json").read_text()) == json.loads(json.dumps(found.to_dict()))


def test_export_writes_how_prompts_begin(tmp_path, tokenizer_dir, without_transformers):
    """A model trained with bos before documents gets a tokenizer that puts it there."""
    transformers = pytest.importorskip("transformers")
    bos = load_tokenizer(tokenizer_dir).bos_id
    export_hf(MODEL, weights_of(MODEL), tokenizer_dir, tmp_path / "out", prefix=(bos,))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_model(tmp_path / "out")
    assert ours.prompt_prefix == (bos,)
    text = "Once upon a time"
    assert theirs(text)["input_ids"] == [bos, *ours.tokenizer.encode(text)]
    export_hf(MODEL, weights_of(MODEL), tmp_path / "out", tmp_path / "again", prefix=())
    assert load_model(tmp_path / "again").prompt_prefix == ()


def test_overwrite_replaces_only_an_export(tmp_path, without_transformers):
    out, mine = tmp_path / "out", tmp_path / "mine"
    found = export_hf(MODEL, weights_of(MODEL), None, out)
    assert found.transformers == "it is not installed"
    with pytest.raises(UserError, match="--overwrite"):
        export_hf(MODEL, weights_of(MODEL, 1), None, out)
    export_hf(MODEL, weights_of(MODEL, 1), None, out, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, import_hf(out)[1], weights_of(MODEL, 1))
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="was not written by lmwright"):
        export_hf(MODEL, weights_of(MODEL), None, mine, overwrite=True)
    assert leftovers(tmp_path) == ["mine", "out"] and leftovers(mine) == ["thesis.txt"]
    for name in ("NOTES.md", "runs/a/metrics.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(UserError, match=f"out: holds {name[:4]}.*, which no export wrote"):
            export_hf(MODEL, weights_of(MODEL), None, out, overwrite=True)
        assert (out / name).read_text() == "mine"
        (out / name).unlink()


def spoil_not_finite(w):
    w["layers"]["up"][1, 2, 3] = np.nan


def spoil_too_large(w):
    w["layers"]["up"][1, 2, 3] = 1e30


def spoil_larger_than_bf16(w):
    w["layers"]["up"][1, 2, 3] = np.finfo("f4").max


@pytest.mark.parametrize(
    "spoil, dtype, says",
    [
        (spoil_not_finite, "fp16", "training diverged"),
        (spoil_too_large, "fp16", "; use bf16 or fp32$"),
        (spoil_larger_than_bf16, "bf16", "; use fp32$"),
    ],
)
def test_values_that_do_not_fit(tmp_path, spoil, dtype, says):
    w = weights_of(MODEL)
    spoil(w)
    with pytest.raises(UserError, match=says):
        export_hf(MODEL, w, None, tmp_path / "out", dtype=dtype)
    assert leftovers(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            export_hf(MODEL, weights_of(MODEL), None, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert leftovers(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match=r"not a folder|cannot be written"):
            export_hf(MODEL, weights_of(MODEL), None, out)


def test_a_tokenizer_larger_than_the_model(tmp_path, tokenizer_dir):
    small = Llama(
        vocab_size=290, embed_dim=8, mlp_dim=12, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, seq_len=16,
    )  # fmt: skip
    with pytest.raises(UserError, match="300 ids, the model only 290"):
        export_hf(small, weights_of(small), tokenizer_dir, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_the_proof_can_fail(tmp_path, monkeypatch, without_transformers):
    """A writer that mixes up two weights is caught, and so is a wrong config."""
    write = writer.write_shards

    def swapped(folder, tensors, shards, total):
        bias = "model.layers.1.mlp.up_proj.bias"
        each = ((name, a[::-1].copy() if name == bias else a) for name, a in tensors)
        write(folder, each, shards, total)

    monkeypatch.setattr(writer, "write_shards", swapped)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj\.bias"):
        export_hf(MODEL, weights_of(MODEL), None, tmp_path / "out")
    monkeypatch.setattr(writer, "write_shards", write)
    config = MODEL.hf.config
    wrong = {"rope_theta": 2.0, "rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}
    monkeypatch.setattr(type(MODEL.hf), "config", lambda self, model: config(model) | wrong)
    with pytest.raises(RuntimeError, match="refused"):
        export_hf(MODEL, weights_of(MODEL), None, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_float16_is_kept(tmp_path, without_transformers):
    export_hf(MODEL, weights_of(MODEL), None, tmp_path / "out", dtype="fp16")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}
