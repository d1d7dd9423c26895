"""Gemma 4's config.json in both of its forms, and what is refused."""

import json
from dataclasses import replace

import pytest

from lmwright import presets
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config

PRESETS = presets.of_section("model")
E2B, DENSE, MOE = (PRESETS[f"gemma4-{size}"]() for size in ("e2b", "31b", "26b-a4b"))


@pytest.mark.parametrize("model", [E2B, DENSE, MOE], ids=["e2b", "31b", "26b-a4b"])
def test_sizes_of_single_layers_may_be_said_for_each(model):
    """As transformers writes them, where released models have keys for all global layers."""
    config = model.hf.config(model)
    sizes = {
        "head_dim": config.pop("global_head_dim"),
        "num_key_value_heads": config.pop("num_global_key_value_heads"),
    }
    own = {k: v for k, v in sizes.items() if v is not None}
    config["per_layer_config"] = {
        str(i): own for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"
    }
    assert model_from_config(config, "config.json") == model
    config["per_layer_config"]["0"] = own
    with pytest.raises(UserError, match="not supported for other than global layers"):
        model_from_config(config, "config.json")


@pytest.mark.parametrize("model", [E2B, DENSE, MOE], ids=["e2b", "31b", "26b-a4b"])
def test_a_config_that_transformers_wrote_again_is_the_same_model(model):
    """Which pads the numbers of layers: "05"."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(**model.hf.config(model))
    written = json.loads(config.to_json_string())
    assert min(map(len, written["per_layer_config"])) == 2
    assert model_from_config(written, "config.json") == model


def test_rotations_and_windows_that_are_not_said_are_those_of_transformers():
    config = E2B.hf.config(E2B)
    del config["rope_parameters"], config["sliding_window"], config["global_head_dim"]
    assert model_from_config(config, "config.json") == E2B


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["sliding_attention"] * 35}, "the last layer is sliding_attention"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input = 100 differs"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "not one object a type of layer"),
        ({"num_kv_shared_layers": 34}, "num_shared_layers: 34 of 35 leave no global layer"),
        ({"per_layer_config": {"4": {"mlp": 3}}}, "per_layer_config"),
        ({"architectures": -1}, "names no architecture"),
        ({"enable_moe_block": True}, "enable_moe_block = True needs num_experts"),
        ({"per_layer_config": {"last": {}}}, "per_layer_config has 'last', not a layer's number"),
        ({"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
          "enable_moe_block": False}, "enable_moe_block = False is not supported"),
        ({"num_experts": "4", "top_k_experts": 2, "moe_intermediate_size": 8,
          "enable_moe_block": True}, "num_experts = '4' is not a whole number above 0"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        model_from_config(E2B.hf.config(E2B) | change, "config.json")


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        (E2B, {"shared_mlp_dim": 7000}, "shared_mlp_dim: .* or twice that, not 7000"),
        (E2B, {"global_kv_heads": 2}, 'only with global_values = "keys"'),
        (E2B, {"layer_pattern": ("local", "global")}, "the last layer .* is a global one"),
        (MOE, {"experts": replace(MOE.experts, scale=2.0)}, "model.experts.scale"),
    ],
)
def test_what_cannot_be_said_is_not_exported(model, change, says):
    changed = replace(model, **change)
    with pytest.raises(UserError, match=says):
        changed.hf.config(changed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_shared_layers": 35}, "35 of 35 leave no global layer"),
        ({"num_shared_layers": 0}, "shared_mlp_dim: has no effect without"),
        ({"global_kv_heads": 3}, "not a multiple of model.global_kv_heads = 3"),
        ({"global_head_dim": 511}, "model.global_head_dim: 511 rotates 511 dims, which is odd"),
    ],
)
def test_fields_that_do_not_go_together(change, says):
    with pytest.raises(UserError, match=says):
        replace(E2B, **change)
