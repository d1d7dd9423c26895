"""What a config.json leaves out, or says as null, is what transformers fills in there."""

import json

import pytest

from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from tests.in_memory import abstract_weights, export_hf
from tests.parity.families import ROWS
from tests.parity.test_moe_parity import ROWS as MOE
from tests.parity.test_moe_parity import SIZES

transformers = pytest.importorskip("transformers")

NULL = ("sliding_window", "q_lora_rank")  # means something else than a key that is not there
DENSE = (
    "cohere", "cohere2", "cwm", "ernie4-5", "gemma1", "gpt-bigcode", "granite-swa", "helium",
    "jais2", "ministral3", "modernbert-decoder", "nemotron",
    "nanochat", "olmo", "olmo-hybrid", "opt", "phi", "qwen2", "seed-oss", "smollm3", "stablelm",
    "starcoder2", "vaultgemma",
)  # fmt: skip
CASES = {name: (ROWS[name].architecture, ROWS[name].said) for name in DENSE} | {
    name: (architecture, {k: v for k, v in (SIZES | said).items() if v is not None or k in NULL})
    for name, (architecture, said) in MOE.items()
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "original_max_position_embeddings": 13, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
HEADS = ("num_key_value_heads", "head_dim")
BY_WEIGHTS = ("enable_moe_block", "num_local_experts", "num_key_value_heads")
"""Keys whose usual value does not fit these sizes, which is found by the weights."""


def filled(architecture, said):
    """A config.json with all that transformers fills in, None where it refuses this one."""
    known = {
        key: value for key, value in said.items() if key not in ("architectures", "model_type")
    }
    try:
        config = getattr(transformers, architecture).config_class(**known)
    except Exception:  # of several packages
        return None
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}


def model_of(config):
    """The model, None where it is refused."""
    try:
        return model_from_config(config, "config.json")
    except UserError:
        return None


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_left_out_has_transformers_value(name):
    architecture, said = CASES[name]
    whole = filled(architecture, said)
    whole.pop("time_step_limit", None)  # which says infinity in a form that its class does not take
    model, compared = model_of(whole), 0
    assert model is not None
    for key in whole.keys() - {"architectures", "model_type"}:
        lacks = {k: v for k, v in whole.items() if k != key}
        for short in (lacks, whole | {key: None}) if key in HEADS else (lacks,):
            if (found := model_of(short)) is None or (there := filled(architecture, short)) is None:
                continue
            assert found == model_of(there) or key in BY_WEIGHTS, key
            compared += 1
    assert compared > 15


def test_a_tied_head_that_transformers_does_not_tie_is_refused(tmp_path):
    """Its Nemotron-H takes the head for missing and makes a random one."""
    row = ROWS["nemotron-h"]
    assert not getattr(transformers, row.architecture)._tied_weights_keys
    config = row.said | {"architectures": [row.architecture], "tie_word_embeddings": True}
    model = model_from_config(config, "config.json")
    with pytest.raises(UserError, match=r'model\.head: "tied" is not computed'):
        export_hf(model, abstract_weights(model.spec()), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "said", [CASES["deepseek-v2"], ("EuroBertForMaskedLM", ROWS["eurobert"].said)]
)
def test_biases_of_mlps_that_are_not_computed_are_refused(said):
    config = said[1] | {"architectures": [said[0]], "mlp_bias": True}
    with pytest.raises(UserError, match="mlp_bias = True is not supported"):
        model_from_config(config, "config.json")


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        (
            "Lfm3ForCausalLM",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 3.0},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
        ),
        (
            "GptOssForCausalLM",
            {
                "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5003.0},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_theta": 777.0,
            },
        ),
        (
            "Ministral3ForCausalLM",
            {
                "rope_parameters": YARN | {"factor": 6.0, "rope_theta": 5003.0},
                "rope_scaling": YARN | {"factor": 3.0, "rope_theta": 5003.0},
            },
        ),
    ],
)
def test_rotations_that_are_said_in_part_or_twice(architecture, said):
    """Thetas that are left out, and both forms at once, of which the older has the say there."""
    short = {**SIZES, "intermediate_size": 80, **said}
    short |= {"norm_eps": short["rms_norm_eps"]} if architecture.startswith("Lfm") else {}
    model = model_of(short | {"architectures": [architecture]})
    assert model is not None and model == model_of(filled(architecture, short))
