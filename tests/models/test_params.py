"""Parameter counts equal transformers' own, for presets too large to build."""

import json
import re
from dataclasses import replace

import pytest

from lmwright import presets
from lmwright.core.param import count_params
from lmwright.errors import UserError
from lmwright.formats.open import find_model, params_command
from lmwright.models.counts import count_by_part, params_report
from lmwright.models.llama import Llama


def test_kisoku_3b(capsys):
    """The sum of the published configuration, by hand."""
    params_command("kisoku-3b")
    text = capsys.readouterr().out
    attention = 2 * 3072 * (32 + 8) * 96
    layer = attention + 3 * 3072 * 8192 + 2 * 3072
    tied = 50304 * 3072 + 32 * layer + 3072
    assert tied == 3_325_627_392
    assert re.search(r"total, tied +3,325,627,392  <- this model", text)
    assert re.search(r"total, untied +3,480,161,280$", text, re.M)
    assert re.search(rf"attention +{attention:,} +x 32 +{32 * attention:,}", text)
    token = 2 * 32 * 8 * 96 * 2  # keys and values, layers, heads, their width, bytes
    assert f"{token:,} bytes for a token" in text
    whole = token * 2048 / 2**20
    assert f"this model {whole} MiB, MHA {4 * whole} MiB, MQA {whole / 8} MiB" in text
    assert "3,480,161,280  <- this model" in params_report(
        "x", find_model("kisoku-3b", ["model.head=untied"])
    )


def test_counts_equal_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for name in ("kisoku-3b", "llama-500k", "llama-135m", "llama-70b"):
        model = presets.of_section("model")[name]()
        config = model.hf.config(model)
        cls = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            theirs = cls(cls.config_class(**config))
        assert count_params(model.spec()) == theirs.num_parameters(), name


def test_parts_sum_to_the_whole():
    model = Llama(
        vocab_size=40, embed_dim=12, mlp_dim=20, num_layers=3, num_heads=6, num_kv_heads=2,
        head_dim=4, seq_len=16, bias="all", qk_norm="head", head="untied",
    )  # fmt: skip
    counts = {(c.part, c.layers): c.total for c in count_by_part(model)}
    assert sum(counts.values()) == count_params(model.spec())
    assert counts == {
        ("embedding", 1): 480,
        ("attention", 3): 3 * 2 * 12 * (6 + 2) * 4,
        ("mlp", 3): 3 * 3 * 12 * 20,
        ("norms", 3): 3 * (2 * 12 + 2 * 4),
        ("norms", 1): 12,
        ("biases", 3): 3 * (24 + 8 + 8 + 12 + 20 + 20 + 12),
        ("head", 1): 480,
    }


def test_a_folder_and_unknown_names(tmp_path):
    model = presets.of_section("model")["llama-500k"]()
    (tmp_path / "config.json").write_text(json.dumps(model.hf.config(model)))
    assert find_model(str(tmp_path)) == model
    for name, overrides, says in (
        ("kisoku-2b", (), "did you mean 'kisoku-3b'"),
        ("kisoku-3b", ("hed=tied",), "did you mean 'head'"),
        ("kisoku-3b", ("head=none",), r"model\.head: 'none'"),
        ("kisoku-3b", ("num_kv_heads=5",), "multiple of"),
        (str(tmp_path), ("hed=tied",), "did you mean 'head'"),
        ("kisoku-3b", ("model.rope_scaling.kind=spiral",), r"model\.rope_scaling: .*spiral"),
        ("kisoku-3b", ("rope_scaling.kind=yarn",), r"rope_scaling\.\w+: is missing; give"),
        ("nowhere.toml", (), r"nowhere\.toml"),
        ("nowhere.gguf", (), r"nowhere\.gguf: is not there"),
        ("s3://acme/tiny", (), "write hf://"),
    ):
        with pytest.raises(UserError, match=says):
            find_model(name, overrides)


def test_words_on_top_of_a_model(tmp_path):
    """Whole fields, fields of a section, another kind of it, and unset again."""
    yarn = ["model.rope_scaling.factor=4", "rope_scaling.original_seq_len=2048",
            "model.rope_scaling.kind=yarn", "seq_len=8192"]  # fmt: skip
    model = find_model("kisoku-3b", yarn)
    assert (model.rope_scaling.kind, model.rope_scaling.factor, model.seq_len) == ("yarn", 4, 8192)
    (tmp_path / "config.json").write_text(json.dumps(model.hf.config(model)))
    assert find_model(str(tmp_path)) == model
    linear = find_model(str(tmp_path), ["rope_scaling.kind=linear", "rope_scaling.factor=2"])
    assert linear.rope_scaling == replace(linear.rope_scaling, factor=2.0)
    assert find_model(str(tmp_path), ["rope_scaling=none"]).rope_scaling is None
