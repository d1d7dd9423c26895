"""Gemma 3's config.json in the form before `rope_parameters`, and what is refused."""

from dataclasses import replace

import pytest

from lmwright import presets
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config


def test_the_older_form_is_the_same_model():
    for name in ("gemma3-1b", "gemma3-4b"):
        model = presets.of_section("model")[name]()
        config = model.hf.config(model)
        assert model_from_config(config, "config.json") == model
        for new in ("rope_parameters", "layer_types"):
            del config[new]
        assert model_from_config(config, "config.json") == model


def test_the_first_release_is_read_as_transformers_reads_it():
    """Its files say `gelu`, also where they say a `hidden_activation`, and mean the tanh form."""
    model = presets.of_section("model")["gemma-2b"]()
    config = model.hf.config(model)
    for said in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert model_from_config(config | said, "config.json") == model
    with pytest.raises(UserError, match="attention_bias is not supported"):
        model_from_config(config | {"attention_bias": True}, "config.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name the type of 26"),
        ({"hidden_activation": "gelu"}, "'gelu' is not supported"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta is null"),
        ({"rope_parameters": None, "rope_local_base_freq": None}, "rope_local_base_freq is null"),
    ],
)
def test_what_is_not_computed_is_refused(change, says):
    model = presets.of_section("model")["gemma3-1b"]()
    with pytest.raises(UserError, match=says):
        model_from_config(model.hf.config(model) | change, "config.json")


@pytest.mark.parametrize(
    "name", ["gemma2-2b", "gemma3-1b", "gemma4-e2b", "olmo3-7b", "mistral-7b", "gpt-oss-20b"]
)
def test_local_layers_without_a_window_are_refused(name):
    """transformers fails on them; where no layer is local, null says nothing."""
    model = presets.of_section("model")[name]()
    config = model.hf.config(model) | {"sliding_window": None}
    config.setdefault("layer_types", ["sliding_attention"] * model.num_layers)
    with pytest.raises(UserError, match=r"^here: sliding_window is null, but layer_types has slid"):
        model_from_config(config, "here")
    if name == "gemma3-1b":
        with pytest.raises(UserError, match="null, but without layer_types there is sliding_att"):
            model_from_config(config | {"layer_types": None}, "here")
    every = config | {"layer_types": ["full_attention"] * model.num_layers}
    if name != "gemma4-e2b":  # whose own config class wants a number
        assert set(model_from_config(every, "here").kinds) == {"global"}


def test_what_cannot_be_said_is_not_exported():
    two, three = (presets.of_section("model")[name]() for name in ("gemma2-2b", "gemma3-1b"))
    for model, says in (
        (replace(two, local_rope_theta=7.0), "local_rope_theta"),
        (replace(three, attention_soft_cap=7.0), "attention_soft_cap"),
        (replace(two, mlp="relu2"), "model.mlp"),
        (replace(three, out_norms="none"), "out_norms"),
    ):
        with pytest.raises(UserError, match=says):
            model.hf.config(model)
