"""Falcon-H1: packed documents are computed as if apart, a cache goes on from any token, and what
config.json says that is not computed is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.models.cached import extend, layers_apart, new_cache
from lmwright.models.counts import params_report
from lmwright.models.falcon_h1 import FalconH1
from lmwright.presets.falcon_h1 import PRESETS

MODEL = FalconH1(
    vocab_size=61, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    seq_len=64, mamba_num_heads=4, mamba_head_dim=10, mamba_state_dim=6, mamba_num_groups=2,
    conv_tokens=3, chunk_tokens=8, norm_eps=0.05, key_multiplier=0.6,
    ssm_multipliers=(1.2, 0.8, 1.1, 0.7, 0.4), mlp_multipliers=(0.9, 0.6),
)  # fmt: skip
SAID = {
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 61, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_ssm": 40, "mamba_d_state": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    draw = lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape) + (p.fill or 0), "f4")  # noqa: E731
    return map_params(draw, MODEL.spec())


def logits(w, tokens, ids, positions):
    of = lambda rows: jnp.asarray([rows], jnp.int32)  # noqa: E731
    batch = Batch(of(tokens), of(ids), of(positions), jnp.ones((1, len(tokens)), jnp.float32))
    return np.asarray(MODEL.logits(w, MODEL.hidden(w, batch, Compute())[0]))[0]


def test_documents_of_a_row_are_computed_as_if_apart(weights):
    """The memories, the last tokens of convolutions and attention begin anew, within a chunk."""
    first, second = [5, 9, 2, 44, 17], [3, 3, 58, 21, 7, 30, 12, 40, 6]
    both = logits(weights, [*first, *second, 0], [*[1] * 5, *[2] * 9, 0], [*range(5), *range(9), 0])
    for found, tokens in ((both[:5], first), (both[5:14], second)):
        alone = logits(weights, tokens, [1] * len(tokens), range(len(tokens)))
        np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.parametrize("unroll", [False, True])
def test_a_cache_goes_on_from_any_token(unroll, weights):
    """Keys and values of all tokens beside memories, of left-padded rows."""
    tokens = [5, 9, 2, 44, 17, 3, 3, 58, 21, 7, 30, 12]
    whole = logits(weights, tokens, [1] * 12, range(12))
    compute = Compute(unroll=unroll)
    w = layers_apart(MODEL, weights) if unroll else weights
    cache = new_cache(MODEL, 1, 16, compute)
    found, row, real = [], [0, 0, *tokens], [False, False, *[True] * 12]
    for begin, end in ((0, 7), (7, 11), (11, 12), (12, 13), (13, 14)):
        x, cache = extend(
            MODEL, w, jnp.asarray([row[begin:end]]), jnp.asarray([real[begin:end]]), cache,
            compute, empty_cache=begin == 0,
        )  # fmt: skip
        found.append(np.asarray(MODEL.logits(w, x))[0])
    np.testing.assert_allclose(np.concatenate(found)[2:], whole, atol=1e-5)


def test_widths_follow_from_what_is_said():
    assert model_from_config(SAID, "x").mamba_head_dim == 10
    assert model_from_config(SAID | {"mamba_d_ssm": None}, "x").mamba_head_dim == 12  # 2 * 24 / 4
    assert model_from_config(SAID, "x").mamba_norm == "none"


@pytest.mark.parametrize(
    "change, why",
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias is not supported"),
        ({"projectors_bias": True}, "projectors_bias is not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias = False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"ssm_multipliers": [1.0, 1.0]}, "not a list of 5 numbers"),
        ({"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers = 'x' is not a number above 0"),
        ({"key_multiplier": 0.0}, "key_multiplier = 0.0 is not a number above 0"),
        ({"mamba_n_heads": 0}, "mamba_n_heads = 0 is not a whole number above 0"),
        ({"mamba_d_ssm": None, "mamba_expand": None}, "mamba_expand = None is not a number"),
        ({"mamba_d_head": 7}, "is not mamba_d_ssm = 40"),
        ({"mamba_n_groups": 3}, "is not a multiple of model.mamba_num_groups = 3"),
    ],
)
def test_what_is_not_computed_is_refused(change, why):
    with pytest.raises(UserError, match=why):
        model_from_config(SAID | change, "config.json")


def test_a_row_of_tokens_has_keys_and_memories():
    text = params_report("falcon-h1-0.5b", PRESETS["falcon-h1-0.5b"]())
    assert "8 query and 2 kv heads of 64 beside 24 memories of 128 x 64" in text
    assert "18,432 bytes for a token and 28,698,624 for a row" in text  # 36 layers of bf16 keys
