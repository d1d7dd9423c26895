"""Bamba and Mamba-2 in config.json: layers and widths that do not go together are refused, and
`params` counts a model without mlps."""

from dataclasses import replace

import pytest

from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.models.bamba import Bamba
from lmwright.models.counts import params_report
from lmwright.models.mamba2 import Mamba2

MODEL = Bamba(
    vocab_size=97, embed_dim=48, mlp_dim=80, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=16,
    seq_len=64, mamba_num_heads=8, mamba_head_dim=12, mixer_pattern=("mamba", "full"),
)  # fmt: skip


def test_layers_with_attention_are_numbered():
    said = MODEL.hf.config(MODEL)
    assert said["attn_layer_indices"] == [1, 3] and said["attn_rotary_emb"] == 8
    assert model_from_config(said, "config.json") == MODEL


@pytest.mark.parametrize("layers", [[4], [-1], "1", [[1]], 3])
def test_layers_that_are_not_there_are_refused(layers):
    said = MODEL.hf.config(MODEL) | {"attn_layer_indices": layers}
    with pytest.raises(UserError, match=r"config\.json: attn_layer_indices = .* from 0 to 3"):
        model_from_config(said, "config.json")


ALONE = Mamba2(
    vocab_size=97, embed_dim=48, num_layers=4, seq_len=64, mamba_num_heads=8, mamba_head_dim=12,
)  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        ({"expand": 3}, r"num_heads = 8 times head_dim = 12 is not expand times hidden_size, 144"),
        ({"expand": None}, r"expand = None is not a number above 0"),
        ({"use_bias": True}, r"use_bias is not supported"),
        ({"use_conv_bias": False}, r"use_conv_bias = False is not supported"),
        ({"time_step_limit": [0.1, 0.2]}, r"time_step_limit = \[0\.1, 0\.2\] is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(change, said):
    with pytest.raises(UserError, match=rf"config\.json: {said}"):
        model_from_config(ALONE.hf.config(ALONE) | change, "config.json")


def test_heads_that_no_factor_gives_are_not_exported():
    with pytest.raises(UserError, match=r"model\.mamba_num_heads: 9 heads of 12 are not a mult"):
        odd = replace(ALONE, mamba_num_heads=9)
        odd.hf.config(odd)


def test_a_model_without_mlps_is_counted():
    report = params_report("m", ALONE)
    assert report.startswith("m: mamba2, 4 layers, embed 48, 8 memories of 128 x 12, vocab 97\n")
    assert "mlp" not in report and "state of a row of any length" in report
