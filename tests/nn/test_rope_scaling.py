"""Every kind of rope scaling has transformers' rotations and attention factor."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from lmwright.errors import UserError
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.nn.rope import RopeScaling, rotations

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEAD_DIM, ORIGINAL = 24, 64
SHORT, LONG = [1.0 + 0.07 * i for i in range(12)], [1.5 + 0.9 * i for i in range(12)]
OLD = {"original_max_position_embeddings": ORIGINAL}
CASES = {
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 6.0, **OLD},
    "yarn-all": {
        "rope_type": "yarn", "factor": 6.0, "beta_fast": 9.0, "beta_slow": 2.0,
        "truncate": False, "attention_factor": 1.3, **OLD,
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 6.0, "mscale": 0.7, "mscale_all_dim": 1.2, **OLD,
    },
    "yarn-ratio": {"rope_type": "yarn", "factor": None, **OLD},
    "llama3": {
        "rope_type": "llama3", "factor": 7.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
        **OLD,
    },
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **OLD},
    "longrope-factor": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
        "attention_factor": 1.7, **OLD,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "factor": 3.0},
    "proportional-whole": {"rope_type": "proportional"},
}  # fmt: skip
LENGTHS = (17, 64, 65, 200, 1000)


def config_of(case):
    most = ORIGINAL if case == "dynamic" else 300
    said = {"rope_theta": 5003.0, **CASES[case]}
    return transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=6, head_dim=HEAD_DIM, max_position_embeddings=most,
        rope_parameters=said,
    )  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_rotations_equal_transformers(case, length):
    config = config_of(case)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, factor = ROPE_INIT_FUNCTIONS[CASES[case]["rope_type"]](config, "cpu", seq_len=length)
    fields = rope_fields(config.to_dict(), "config.json")
    scaling = TypeAdapter(RopeScaling).validate_python(fields["rope_scaling"])
    ours, longer = rotations(HEAD_DIM, fields["rope_theta"], scaling, length)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    assert ours.dtype == np.float32
    assert longer == pytest.approx(factor, rel=1e-12)
    again = rope_fields(rope_config(fields["rope_theta"], scaling, 300), "config.json")
    assert TypeAdapter(RopeScaling).validate_python(again["rope_scaling"]) == scaling
    assert again["rope_theta"] == fields["rope_theta"]


def test_the_cases_differ():
    """Lengths beyond the original change what depends on them, and the factors matter."""
    for case in ("dynamic", "longrope"):
        fields = rope_fields(config_of(case).to_dict(), "config.json")
        scaling = TypeAdapter(RopeScaling).validate_python(fields["rope_scaling"])
        inside, beyond = (rotations(HEAD_DIM, 5003.0, scaling, n)[0] for n in (64, 200))
        assert np.abs(inside / beyond - 1).max() > 0.1
    plain = rotations(HEAD_DIM, 5003.0, None, 200)
    assert plain[1] == 1.0


def test_the_older_form_of_config_json():
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_fields(old, "x") == {
        "rope_theta": 7.0, "rope_scaling": {"kind": "linear", "factor": 2.0},
    }  # fmt: skip
    plain = {"rope_theta": 7.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    assert rope_fields(plain, "x") == {"rope_theta": 7.0, "rope_scaling": None}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"rope_type": "spiral"}, "rope scaling 'spiral' is not supported; these are: .*yarn"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_section"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_computed_is_refused(said, says):
    with pytest.raises(UserError, match=says):
        rope_fields({"rope_parameters": said, "max_position_embeddings": 99}, "config.json")
