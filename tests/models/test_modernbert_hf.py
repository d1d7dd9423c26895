"""config.json of ModernBERT in both forms: that of the released models, and transformers' own."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import model_from_config
from lmwright.presets import of_section
from tests.in_memory import export_hf

RELEASED = {  # of answerdotai/ModernBERT-base, which transformers 4.48 wrote
    "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert",
    "attention_bias": False, "attention_dropout": 0.0, "classifier_activation": "gelu",
    "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean",
    "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
    "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-05,
    "num_attention_heads": 12, "num_hidden_layers": 22, "position_embedding_type": "absolute",
    "tie_word_embeddings": True, "vocab_size": 50368,
}  # fmt: skip
BASE = of_section("model")["modernbert-base"]()


def test_the_released_config_is_the_preset():
    assert model_from_config(RELEASED, "config.json") == BASE


def test_half_a_window_by_its_other_name():
    """A property of transformers' config that a config.json may set."""
    theirs = pytest.importorskip("transformers").ModernBertConfig(**RELEASED, sliding_window=9)
    assert theirs.local_attention == 18
    assert model_from_config(RELEASED | {"sliding_window": 9}, "x").window == 18 // 2 + 1


def test_an_export_says_both_forms():
    said = json.loads(json.dumps(BASE.hf.config(BASE)))
    older = {k: v for k, v in said.items() if k not in ("layer_types", "rope_parameters")}
    newer = {k: v for k, v in said.items() if "theta" not in k and "every" not in k}
    assert len(older) == len(said) - 2 and len(newer) == len(said) - 3
    assert model_from_config(older, "x") == model_from_config(newer, "x") == BASE


@pytest.mark.parametrize(
    "change, said",
    [
        ({"classifier_activation": "relu"}, "classifier_activation 'relu'"),
        ({"hidden_activation": "gelu_new"}, "'gelu_new' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "sliding_attention layers"),
        ({"layer_types": ["full_attention"]}, "22 layers"),
    ],
)
def test_what_is_not_computed_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        model_from_config(RELEASED | change, "config.json")


@pytest.mark.parametrize("change", [{"num_kv_heads": 6}, {"head_dim": 32}])
def test_heads_that_it_cannot_have_are_refused(change):
    model = replace(BASE, **change)
    with pytest.raises(UserError, match=next(iter(change))):
        model.hf.config(model)


DECODER = of_section("model")["ettin-decoder-150m"]()


@pytest.mark.parametrize("said", [{"local_attention": None}, {"sliding_window": -1}])
def test_a_decoder_needs_a_window_where_layers_have_one(said):
    config = DECODER.hf.config(DECODER) | {"sliding_window": None} | said
    with pytest.raises(UserError, match="sliding_attention have no window; set local_attention"):
        model_from_config(config, "config.json")
    everywhere = config | {"layer_types": ["full_attention"] * 22}
    assert model_from_config(everywhere, "config.json").windows == (None,) * 22


def test_ids_of_a_decoder_are_in_its_vocabulary(tmp_path):
    """transformers' class takes no null, and would have rows for the released models' ids."""
    transformers = pytest.importorskip("transformers")
    model = replace(DECODER, vocab_size=99, num_layers=2)
    export_hf(model, init_weights(model.spec(), jax.random.key(0)), None, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    ids = [config[f"{name}_token_id"] for name in ("bos", "pad", "cls", "sep")]
    assert ids == [98] * 4 and config["eos_token_id"] is None
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize("base", [BASE, DECODER], ids=("encoder", "decoder"))
def test_fresh_weights_are_drawn_as_theirs(base):
    """Deviation and largest value of each matrix, in units of what its deviation was before the
    cut; head and logits begin as they do there."""
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"embed_dim": 128, "mlp_dim": 192, "num_layers": 4, "num_heads": 2, "num_kv_heads": 2}
    model = replace(base, **sizes, vocab_size=999, init_cut=2.0)
    torch.manual_seed(0)
    cls = getattr(transformers, model.hf.architectures[0])
    theirs = cls(cls.config_class(**model.hf.config(model))).state_dict()
    ours = HfTensors(model, init_weights(model.spec(), jax.random.key(0)))
    for name in ours:
        a, b = np.asarray(ours[name], np.float64), theirs[name].double().numpy()
        assert a.shape == b.shape
        if a.ndim == 2:
            np.testing.assert_allclose(a.std(), b.std(), rtol=0.05, err_msg=name)
            np.testing.assert_allclose(abs(a).max(), abs(b).max(), rtol=0.01, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b)
    plain = init_weights(replace(model, init_cut=None).spec(), jax.random.key(0))
    assert (
        abs(plain["embed"]).max() > 1.5 * abs(ours["model.embeddings.tok_embeddings.weight"]).max()
    )
