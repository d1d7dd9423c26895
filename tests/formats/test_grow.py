"""Larger models made of smaller ones, against tiles laid by hand as ModernBERT's paper and code
describe them."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lmwright.cli.main import main
from lmwright.core.param import init_weights, map_params, walk
from lmwright.errors import UserError
from lmwright.formats.grow import grow_command, source_layer, wrapped
from lmwright.models.eurobert import EuroBert
from lmwright.models.experts import Experts
from lmwright.models.gemma4 import Gemma4
from lmwright.models.llama import Llama
from lmwright.models.modernbert import ModernBert
from lmwright.models.moe import Mixtral
from lmwright.models.qwen3_5 import Qwen35
from tests.in_memory import export_hf

SIZES = {"vocab_size": 40, "embed_dim": 32, "mlp_dim": 20, "num_heads": 4, "head_dim": 8,
         "seq_len": 32}  # fmt: skip
SMALL = ModernBert(**SIZES, num_layers=5, num_kv_heads=4, window=5)
WORDS = ["embed_dim=48", "mlp_dim=33", "num_layers=8", "num_heads=6", "num_kv_heads=6"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a small model, whose norms are not ones."""
    folder = tmp_path_factory.mktemp("small") / "model"
    dice = np.random.default_rng(0)
    w = map_params(lambda p: dice.normal(size=p.shape).astype(np.float32), SMALL.spec())
    export_hf(SMALL, w, None, folder)
    return folder


def laid(small, rows, columns=None):
    """Tiles of a matrix or vector: the middle, then each side, one row or column at a time."""
    for axis, size in enumerate((rows, columns)[: small.ndim]):
        old = np.moveaxis(small, axis, 0)
        was, before = len(old), (size - len(old)) // 2
        new = np.zeros((size, *old.shape[1:]), small.dtype)
        new[before : before + was] = old
        for i in range(before):
            new[before - 1 - i] = old[was - 1 - i % was]
        for i in range(before + was, size):
            new[i] = old[(i - before) % was]
        small = np.moveaxis(new, 0, axis)
    return small


def by_hand(small):
    """All tensors of the larger model by name: D 32 to 48, F 20 to 33, 4 to 6 heads of 8."""
    d, f, a = 48, 33, 48
    of_layer = {
        "attn_norm.weight": lambda w: laid(w, d),
        "attn.Wqkv.weight": lambda w: np.concatenate([laid(p, a, d) for p in np.split(w, 3)]),
        "attn.Wo.weight": lambda w: laid(w, d, a),
        "mlp_norm.weight": lambda w: laid(w, d),
        "mlp.Wi.weight": lambda w: np.concatenate([laid(p, f, d) for p in np.split(w, 2)]),
        "mlp.Wo.weight": lambda w: laid(w, d, f),
    }
    made = {
        "model.embeddings.tok_embeddings.weight": lambda w: laid(w, 40, d),
        "model.embeddings.norm.weight": lambda w: laid(w, d),
        "model.final_norm.weight": lambda w: laid(w, d),
        "head.dense.weight": lambda w: laid(w, d, d),
        "head.norm.weight": lambda w: laid(w, d),
        "decoder.bias": lambda w: w,
    }
    large = {name: make(small[name]) for name, make in made.items()}
    for i in range(8):
        for name, make in of_layer.items():
            source = small.get(f"model.layers.{round(i * 5 / 8)}.{name}")
            if source is not None:
                large[f"model.layers.{i}.{name}"] = make(source)
    return large


def test_a_larger_modernbert_is_tiled_as_theirs(small, tmp_path):
    grow_command(str(small), tmp_path / "large", WORDS)
    found = load_file(tmp_path / "large" / "model.safetensors")
    expected = by_hand(load_file(small / "model.safetensors"))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (8, 48)


def test_layers_are_spread_evenly():
    """Those of ModernBERT base over large: the norm that layer 0 lacks is asked for nowhere."""
    large = [source_layer(i, 22, 28) for i in range(28)]
    assert large == [round(i * 22 / 28) for i in range(28)]
    assert large[:2] == [0, 1] and sorted(set(large)) == list(range(22))
    assert [source_layer(i, 2, 6) for i in range(6)] == [0, 0, 1, 1, 1, 1]
    assert list(wrapped(4, 7)) == [3, 0, 1, 2, 3, 0, 1]


def test_a_norm_that_the_first_layer_lacks_is_fresh(small, tmp_path):
    grow_command(str(small), tmp_path / "deep", ["num_layers=12"])
    found = load_file(tmp_path / "deep" / "model.safetensors")
    np.testing.assert_array_equal(found["model.layers.1.attn_norm.weight"], np.ones(32))
    assert "model.layers.0.attn_norm.weight" not in found


def test_grouped_heads_go_with_their_keys(tmp_path):
    """Attention of the larger model has copies of the smaller one's pairs."""
    model = Llama(**SIZES | {"num_heads": 4}, num_kv_heads=2, num_layers=2)
    w = init_weights(model.spec(), jax.random.key(0))
    export_hf(model, w, None, tmp_path / "small")
    grow_command(str(tmp_path / "small"), tmp_path / "large", ["num_heads=6", "num_kv_heads=3"])
    q, k = (
        load_file(tmp_path / "large" / "model.safetensors")[f"model.layers.0.self_attn.{n}.weight"]
        for n in ("q_proj", "k_proj")
    )
    old = {path: np.asarray(leaf) for path, leaf in walk(w)}
    q, k = (a.reshape(-1, 8, 32) for a in (q, k))
    for head in range(6):
        pair = (q[head], k[head // 2])
        match = [
            n for n in range(4)
            if np.array_equal(pair[0], old["layers.q"][0, :, n].T)
            and np.array_equal(pair[1], old["layers.k"][0, :, n // 2].T)
        ]  # fmt: skip
        assert len(match) == 1


@pytest.mark.parametrize(
    "model, sources",
    [
        # layer 3 of 8 has attention, so it is made from layer 3 of 4 and not from layer 2
        (Qwen35(**SIZES, num_layers=4, num_kv_heads=2, linear_num_key_heads=2,
                linear_num_value_heads=4, linear_head_dim=6), (0, 0, 1, 3, 2, 2, 2, 3)),
        # the names of a global layer are among those of a local one, whose heads are smaller
        (Gemma4(**SIZES, num_layers=2, num_kv_heads=2, layer_pattern=("local", "global"), window=5,
                global_head_dim=12, global_kv_heads=1, global_values="keys"), (0, 1, 0, 1)),
    ],
)  # fmt: skip
def test_layers_are_made_from_the_nearest_of_their_kind(model, sources, tmp_path):
    w = init_weights(model.spec(), jax.random.key(0))
    export_hf(model, w, None, tmp_path / "small")
    grow_command(str(tmp_path / "small"), tmp_path / "deep", [f"num_layers={len(sources)}"])
    old, new = (load_file(tmp_path / n / "model.safetensors") for n in ("small", "deep"))
    for layer, source in enumerate(sources):
        theirs = {n.split(".", 3)[3]: a for n, a in old.items() if f".layers.{source}." in n}
        ours = {n.split(".", 3)[3]: a for n, a in new.items() if f".layers.{layer}." in n}
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(a, theirs[n]) for n, a in ours.items())


def test_what_transformers_cannot_load_says_why(tmp_path, capsys):
    """Its error has the reason in the second line."""
    pytest.importorskip("transformers")
    model = Llama(**SIZES, num_kv_heads=2, num_layers=1)
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "small")
    assert main(["grow", str(tmp_path / "small"), str(tmp_path / "large"), "embed_dim=34"]) == 0
    said = capsys.readouterr().out
    assert "cannot load it: " in said and "The hidden size (34) is not a multiple" in said


def test_heads_of_linear_layers_do_not_grow(tmp_path):
    """Theirs are queries, keys and values in one, in other shares than those of attention."""
    model = Qwen35(**SIZES, num_layers=4, num_kv_heads=2, linear_num_key_heads=2,
                   linear_num_value_heads=4, linear_head_dim=6)  # fmt: skip
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "small")
    words = ["embed_dim=48", "linear_num_value_heads=8"]
    with pytest.raises(UserError, match=r"linear_num_value_heads: 8 is not the 4 .* what grows is"):
        grow_command(str(tmp_path / "small"), tmp_path / "large", words)


@pytest.mark.parametrize(
    "words, said",
    [
        (["num_layers=4"], "num_layers: the model's table of layer inputs is for its 2 layers"),
        (["num_heads=8", "num_kv_heads=4"], "num_heads: global layers have 1 heads of keys"),
    ],
)
def test_what_a_gemma4_cannot_grow(tmp_path, words, said):
    model = Gemma4(**SIZES, num_layers=2, num_kv_heads=2, layer_pattern=("local", "global"),
                   window=5, global_head_dim=12, global_kv_heads=1, global_values="keys",
                   layer_input_dim=6)  # fmt: skip
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "small")
    with pytest.raises(UserError, match=said):
        grow_command(str(tmp_path / "small"), tmp_path / "large", words)


def test_experts_do_not_grow(tmp_path):
    """The message names the one field of their section."""
    experts = Experts(num_experts=2, experts_per_token=1, mlp_dim=8)
    sizes = {name: size for name, size in SIZES.items() if name != "mlp_dim"}
    model = Mixtral(**sizes, num_layers=1, num_kv_heads=2, experts=experts)
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "small")
    with pytest.raises(UserError, match=r"^experts\.mlp_dim: 12 is not the 8 of the model; "):
        grow_command(str(tmp_path / "small"), tmp_path / "large", ["experts.mlp_dim=12"])


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "no size is larger; give sizes such as num_layers=28"),
        (["embed_dim=16"], "embed_dim: 16 is less than the 32"),
        (["head_dim=16"], "head_dim: 16 is not the 8 .* add heads"),
        (["num_heads=8"], "num_kv_heads: 8 heads on 4 are other groups .* keep 1 to one"),
        (["num_layers=8", "vocab_size=64"], "vocab is 40 and would be 64; lmwright vocab"),
        (["num_layers=8", "embd_dim=64"], "embd_dim=64: the model has no such field; did you mean"),
        (["--like", "eurobert-210m"], "of kind 'eurobert' and the model of 'modernbert'"),
        (["--like", "modernbert-hueg"], "no preset 'modernbert-hueg'; did you mean"),
    ],
)
def test_what_cannot_grow(small, tmp_path, words, said):
    like = {"like": words[1]} if words[:1] == ["--like"] else {}
    with pytest.raises(UserError, match=said) as error:
        grow_command(str(small), tmp_path / "out", [] if like else words, **like)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_the_sizes_of_a_preset(small, tmp_path, monkeypatch):
    """Its sizes alone: the smaller model's other settings stay."""
    from lmwright import presets

    sizes = SIZES | {"mlp_dim": 28, "vocab_size": 999, "seq_len": 64}
    wider = ModernBert(**sizes, num_layers=6, num_kv_heads=4, window=9)
    monkeypatch.setattr(presets, "of_section", lambda section: {"wider": lambda: wider})
    assert main(["grow", str(small), str(tmp_path / "large"), "--like", "wider"]) == 0
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["intermediate_size"], config["vocab_size"], config["local_attention"]) == (
        28,
        40,
        8,
    )


def test_a_classifier_does_not_grow(tmp_path):
    from lmwright.models.classifier import Classifier

    encoder = EuroBert(**SIZES, num_layers=2, num_kv_heads=2)
    model = Classifier(encoder=encoder, labels=("a", "b"), pooling="mean")
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "small")
    with pytest.raises(UserError, match="grow the model that it was made from"):
        grow_command(str(tmp_path / "small"), tmp_path / "large", ["num_layers=4"])
