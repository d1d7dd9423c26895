"""Bamba's layers with attention in config.json: what is no list of layers is refused."""

import pytest

from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.models.bamba import Bamba

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
