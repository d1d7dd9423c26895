"""Import: the real model equals transformers and its author's text; bad folders are refused
with one sentence, and nothing is left behind."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.evals.generate import Sampling, generate
from lmwright.evals.prompted import generate_command
from lmwright.formats.convert import import_command
from lmwright.formats.hf_read import import_hf
from lmwright.formats.load import load_model
from lmwright.formats.open import find_model, init_fields, open_place
from lmwright.formats.proof import logits
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from tests.in_memory import to_hf

TEXT = "Lily and Tom went to the park. They saw a big dog and a small bird."


@pytest.fixture(scope="module")
def stories(shared_data):
    return shared_data / "models" / "stories260k"


@pytest.fixture(scope="module")
def loaded(stories):
    return load_model(stories)


def test_real_model_gives_its_authors_text(stories, capsys):
    """Greedy from bos alone, 256 tokens, character for character."""
    generate_command(stories, [""], max_new_tokens=256)
    expected = (stories / "expected_greedy.txt").read_text()
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    assert len(expected) > 500


def test_real_model_logits_and_gradients_equal_transformers(stories, loaded):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    ids = np.asarray([[1, *loaded.tokenizer.encode(TEXT)]], np.int32)
    assert ids.shape[1] > 25
    out = theirs(input_ids=torch.tensor(ids).long(), labels=torch.tensor(ids).long())
    out.loss.backward()
    ours = logits(loaded.model, loaded.weights, ids)
    np.testing.assert_allclose(ours, out.logits.detach().numpy(), rtol=1e-4, atol=1e-4)

    ones = jnp.ones(ids.shape)
    positions = jnp.arange(ids.shape[1])[None]
    batch = Batch(jnp.asarray(ids), ones.astype(jnp.int32), positions, ones)

    def loss(w):
        result = Clm().loss(loaded.model, w, batch, jax.random.key(0), Compute())
        return result.total / result.weight

    grads = to_hf(loaded.model, jax.jit(jax.grad(loss))(loaded.weights))
    for name, parameter in theirs.named_parameters():
        grad = parameter.grad.numpy()
        atol = 2e-5 * np.abs(grad).max()
        np.testing.assert_allclose(grads[name], grad, rtol=1e-3, atol=atol, err_msg=name)


def test_imported_and_exported_model_gives_the_same_text_in_transformers(stories, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    proof = import_command(stories, tmp_path / "imported")
    assert proof.source_to_folder.max_abs_diff == 0.0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "imported", dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "imported")
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    out = theirs.generate(input_ids=inputs["input_ids"], max_new_tokens=60, do_sample=False)
    mine = load_model(tmp_path / "imported")
    found = generate(
        mine.model, mine.weights, mine.tokenizer, ["Once upon a time"], Sampling(60),
        prefix=mine.prompt_prefix,
    )  # fmt: skip
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    assert "Once upon a time" + found[0].text == text and len(text) > 120


# Bad folders, made from a small good one.

MODEL = Llama(
    vocab_size=40, embed_dim=12, mlp_dim=20, num_layers=2, num_heads=3, num_kv_heads=1,
    head_dim=4, seq_len=16,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    w = jax.tree.map(
        lambda p: rng.standard_normal(p.shape).astype("f4"),
        MODEL.spec(),
        is_leaf=lambda leaf: hasattr(leaf, "arrow"),
    )
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL.hf.config(MODEL)))
    save_file(to_hf(MODEL, w), path / "model.safetensors")
    return path


def set_config(**changes):
    def spoil(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return spoil


def set_tensors(change):
    def spoil(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return spoil


def truncate(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def only_pickle(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def lost_shard(path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_lies(path):
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_escapes(path):
    index = {"weight_map": {"model.norm.weight": "../model/model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


NORM, Q = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD = {
    "missing tensor": (set_tensors(lambda t: t.pop(NORM)), f"lacks {NORM}"),
    "other form": (set_tensors(lambda t: t.update({f"{NORM}.qweight": t.pop(NORM)})),
                   f"lacks {NORM}, and holds {NORM}.qweight instead, which is a different form"),
    "extra tensor": (
        set_tensors(lambda t: t.update({Q + "_scale": t[NORM]})), f"holds {Q}_scale, which"),
    "wrong shape": (set_tensors(lambda t: t.update({Q: t[Q][1:].copy()})), r"\[11, 12\]"),
    "integers": (set_tensors(lambda t: t.update({Q: t[Q].astype("i1")})), "is int8"),
    "tied head that differs": (
        set_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "lm_head.weight differs"),
    "untied without head": (set_config(tie_word_embeddings=False), "lacks lm_head.weight"),
    "truncated": (truncate, "truncated or damaged"),
    "pickle only": (only_pickle, r"pickled weights \(pytorch_model.bin\)"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no model.safetensors"),
    "lost shard": (lost_shard, "00001-of-00002.safetensors: missing"),
    "index that lies": (index_that_lies, "disagrees"),
    "index that escapes": (index_that_escapes, "not an index"),
    "other architecture": (
        set_config(architectures=["MptForCausalLM"]), "'MptForCausalLM' is not supported"),
    "no architecture": (set_config(architectures="LlamaForCausalLM"), "names no architecture"),
    "a near architecture": (
        set_config(architectures=["Qwen4MoeForCausalLM"]), "the nearest: Qwen3MoeForCausalLM and"),
    "too many layers": (set_config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "not a number": (set_tensors(lambda t: t[NORM].fill(np.nan)), "the source is damaged"),
    "rope scaling": (
        set_config(rope_scaling={"rope_type": "spiral", "factor": 8.0}), "rope scaling 'spiral'"),
    "quantized": (set_config(quantization_config={"bits": 4}), "quantization_config"),
    "other activation": (set_config(hidden_act="gelu_new"), "'gelu_new' is not supported"),
    "both ways": (set_config(is_causal=False), "is_causal = false is not the direction"),
    "neither way": (set_config(is_causal=None), "is_causal = null is not the direction"),
    "an encoder one way": (
        set_config(architectures=["EuroBertForMaskedLM"], is_causal=True),
        "of EuroBertForMaskedLM here, whose tokens see all others"),
    "layers of an unknown type": (
        set_config(architectures=["Qwen3ForCausalLM"], use_sliding_window=True,
                   layer_types=["chunked_attention"] * 2), "layer_types"),
    "string for a number": (set_config(vocab_size="many"), "vocab_size = 'many' is not"),
    "a theta of 0": (set_config(rope_parameters={"rope_theta": 0}), "rope_theta = 0 is not a num"),
    "heads that do not divide": (set_config(num_attention_heads=7, head_dim=None),
                                 "lacks head_dim"),
    "nonsense": (set_config(rope_parameters=3), "is not an object"),
    "impossible heads": (set_config(num_key_value_heads=2), "config.json: .*multiple of"),
    "not JSON": (lambda p: (p / "config.json").write_text("{"), "config.json: cannot be read"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_folder_is_one_clear_error(case, folder, tmp_path):
    spoil, says = BAD[case]
    spoil(folder)
    with pytest.raises(UserError, match=says) as caught:
        import_command(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_taken_to_longer_rows(folder, tmp_path):
    """What transformers says of the source and of the longer model is compared, both."""
    words = ["seq_len=64", "model.rope_scaling.kind=yarn", "rope_scaling.factor=4",
             "rope_scaling.original_seq_len=16"]  # fmt: skip
    proof = import_command(folder, tmp_path / "out", words)
    assert proof.changed["seq_len"] == (16, 64) and len(proof.changed) == 2
    if proof.folder_to_transformers is not None:
        assert proof.source_to_transformers.max_abs_diff < 1e-4
    assert "changed: seq_len from 16 to 64" in (tmp_path / "out" / "README.md").read_text()
    longer = load_model(tmp_path / "out")
    assert longer.model.rope_scaling.factor == 4 and longer.model.seq_len == 64
    for words, says in ((["embed_dim=24"], "change only what no weight"), (["seq=3"], "did you m")):
        with pytest.raises(UserError, match=says):
            import_command(folder, tmp_path / "other", words)
    assert not (tmp_path / "other").exists()


def test_harmless_extras_are_tolerated(folder):
    before = import_hf(folder)[1]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "f4")}
    set_tensors(
        lambda t: t.update(extra | {"lm_head.weight": t["model.embed_tokens.weight"].copy()})
    )(folder)
    jax.tree.map(np.testing.assert_array_equal, import_hf(folder)[1], before)


def test_shards_equal_one_file(folder):
    before = import_hf(folder)[1]
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((tensors[:7], tensors[7:])):
        file = f"part{number}.safetensors"
        save_file(dict(part), folder / file)
        weight_map |= {name: file for name, _ in part}
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    jax.tree.map(np.testing.assert_array_equal, import_hf(folder)[1], before)


def test_an_older_tokenizer_and_its_terms_come_along(folder, tmp_path, monkeypatch):
    """vocab.json and merges.txt become a tokenizer.json that says the same."""
    monkeypatch.setattr("lmwright.formats.reference.importlib.util.find_spec", lambda name: None)
    vocab = {"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4, "<|endoftext|>": 5}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    (folder / "LICENSE.txt").write_text("be kind")
    import_command(folder, tmp_path / "out")
    assert load_model(tmp_path / "out").tokenizer.encode("abcab") == [4, 2]
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "be kind"


def test_neither_run_nor_model(tmp_path):
    with pytest.raises(UserError, match=r"neither run\.toml nor config\.json"):
        load_model(tmp_path)
    for name, says in (
        ("gpt2", r"is not there.*with its owner, as in hf://owner/gpt2"),
        ("HuggingFaceTB/SmolLM2", r"is not there.*from the hub, write hf://HuggingFaceTB/SmolLM2"),
        (str(tmp_path / "nowhere"), "is not there; give a run directory"),
    ):
        for verb in (load_model, open_place):
            with pytest.raises(UserError, match=says):
                verb(name)
    for name, says in (
        ("model.bin", "pickled"), ("model.safetensors", "only weights"), ("a.txt", "not a fol"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(b"\x80\x04")
        for verb in (load_model, find_model, lambda path: import_command(path, tmp_path / "out")):
            with pytest.raises(UserError, match=says):
                verb(str(tmp_path / name))
    for named in ({}, {"config.json": '{"model_type": "gpt_neo"}'}):
        folder = tmp_path / f"pickles-{len(named)}"
        folder.mkdir()
        for name, text in ({"pytorch_model.bin": "x"} | named).items():
            (folder / name).write_text(text)
        for verb in (load_model, init_fields):
            with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model\.bin\)"):
                verb(str(folder))
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UserError, match="lmwright export"):
        import_command(tmp_path, tmp_path / "out")


def test_null_fields_take_their_defaults(folder):
    model = import_hf(folder)[0]
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    set_config(head_dim=None)(copy)
    assert import_hf(copy)[0] == model


def test_a_mistral_with_types_of_layers_is_a_ministral(tmp_path):
    """As transformers' AutoConfig takes it: some layers have no window."""
    transformers = pytest.importorskip("transformers")
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "sliding_window": 7, "layer_types": types,
    }  # fmt: skip
    named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | named))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == "ministral" and theirs.layer_types == types
    assert open_place(tmp_path).model.kinds == ("local", "global", "local")
    (tmp_path / "config.json").write_text(json.dumps(sizes | named | {"layer_types": None}))
    assert set(open_place(tmp_path).model.kinds) == {"local"}
