"""Keys of a config.json of experts that are null: as transformers takes them, or refused."""

import pytest

from lmwright import presets
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config

PRESETS = presets.of_section("model")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sliding_window", "config.json: sliding_window is null, but layer_types has sliding"),
        ("swiglu_limit", "config.json: swiglu_limit = None is not supported; it is 7.0"),
        ("swiglu_alpha", "config.json: swiglu_alpha = None is not supported"),
    ],
)
def test_gpt_oss_does_not_replace_null_by_a_number(key, says):
    """transformers computes nothing with these."""
    model = PRESETS["gpt-oss-20b"]()
    with pytest.raises(UserError, match=says):
        model_from_config(model.hf.config(model) | {key: None}, "config.json")


def test_gpt_oss_without_a_window_needs_none():
    model = PRESETS["gpt-oss-20b"]()
    every = {"sliding_window": None, "layer_types": ["full_attention"] * model.num_layers}
    assert model_from_config(model.hf.config(model) | every, "config.json").window is None


def test_routing_weights_of_deepseek_v3_are_not_normalized_where_it_is_null():
    """As in transformers, where null is false, and not its default for an absent key."""
    model = PRESETS["deepseek-v3"]()
    config = model.hf.config(model)
    shares = lambda config: model_from_config(config, "config.json").experts.shares  # noqa: E731
    assert shares(config | {"norm_topk_prob": None}) == "all"
    assert config.pop("norm_topk_prob") and shares(config) == "chosen"
