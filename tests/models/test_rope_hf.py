"""Rotations of config.json files that leave things out: as transformers fills them in."""

import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.nn.rope import rotations

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 4, 5, 7]}
YARN = {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}
CASES = {
    "phi3": ("Phi3", {"original_max_position_embeddings": 40, "rope_scaling": LONG}),
    "phi3 of old": ("Phi3", {"rope_scaling": LONG | {"original_max_position_embeddings": 40}}),
    "phi3 null": (
        "Phi3", {"max_position_embeddings": 512, "original_max_position_embeddings": 64,
                 "rope_scaling": LONG}),
    "olmo2": ("Olmo2", {"rope_scaling": {"type": "yarn", "factor": 3.0}}),
    "finetuned": (
        "Llama", {"max_position_embeddings": 192, "rope_scaling": YARN | {"finetuned": True}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rotations_of_a_sparse_config(case):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    family, said = CASES[case]
    theirs = getattr(transformers, f"{family}Config")(**SIZES, **said, pad_token_id=None)
    kind = theirs.rope_parameters["rope_type"]
    wanted, length = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=32)
    model = model_from_config(SIZES | said | {"architectures": [f"{family}ForCausalLM"]}, case)
    found, scale = rotations(8, model.rope_theta, model.rope_scaling, 32)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
    assert scale == pytest.approx(length, rel=1e-6)


@pytest.mark.parametrize(
    "said, says",
    [
        ({"rope_theta": True}, "rope_theta = True is not a number"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4' is not a number"),
        ({"rope_theta": 0}, "rope_theta = 0 is not a number above 0; correct it"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta = 0.0 is not"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor = 0 is not"),
        ({"num_attention_heads": 0}, "json: num_attention_heads = 0 is not a whole number above 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True is not a whole"),
        ({"hidden_size": 2.5}, "hidden_size = 2.5 is not a whole"),
        ({"vocab_size": -1}, "vocab_size = -1 is not"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05 is not a number above 0"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling is not an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is neither"),
    ],
)
def test_odd_types_are_one_clear_error(said, says):
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    with pytest.raises(UserError, match=says):
        model_from_config(config | said, "config.json")


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Olmo2", "Olmoe"])
def test_key_heads_that_a_config_leaves_out(family, null):
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    sizes |= {"num_attention_heads": 16, "hidden_size": 64}
    sizes |= {"num_key_value_heads": None} if null else {}
    theirs = getattr(transformers, f"{family}Config")(**sizes)
    config = theirs.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    del config["num_key_value_heads"]
    model = model_from_config(config | ({"num_key_value_heads": None} if null else {}), "c.json")
    assert model.num_kv_heads == theirs.num_key_value_heads


def test_key_heads_of_dots1():
    sizes = SIZES | {"num_attention_heads": 64, "hidden_size": 256, "num_key_value_heads": None}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
    theirs = transformers.Dots1Config(**sizes).to_dict()
    del theirs["num_key_value_heads"]
    config = theirs | {"architectures": ["Dots1ForCausalLM"]}
    left_out = transformers.Dots1Config(**theirs).num_key_value_heads
    assert model_from_config(config, "c.json").num_kv_heads == left_out == 32
    config["num_key_value_heads"] = None
    assert model_from_config(config, "c.json").num_kv_heads == 64


@pytest.mark.parametrize("said", [{}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mixtral", "BitNet"])
def test_a_theta_that_is_left_out(family, said):
    """That of the family, also beside a theta of another place, which transformers leaves."""
    said = SIZES | said | {"max_position_embeddings": 64}
    said |= {"rope_parameters": {"rope_theta": 77.0}} if "rope_scaling" in said else {}
    theirs = getattr(transformers, f"{family}Config")(**said)
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    config = said | {"architectures": [f"{family}ForCausalLM"]}
    config |= {"quantization_config": online} if family == "BitNet" else {}
    config |= {"hidden_act": "relu2"} if family == "BitNet" else {}
    model = model_from_config(config, "c.json")
    assert model.rope_theta == theirs.rope_parameters["rope_theta"]


def test_masked_diffusion_in_qwen2_has_its_defaults():
    said = {k: v for k, v in SIZES.items() if k != "rms_norm_eps"} | {"max_position_embeddings": 64}
    more = {"architectures": ["Qwen2ForCausalLM"], "masked_diffusion": {}, "is_causal": False}
    theirs = transformers.Qwen2Config(**said)
    assert model_from_config(said | more, "c.json").norm_eps == theirs.rms_norm_eps
