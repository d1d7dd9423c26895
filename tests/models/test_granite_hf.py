"""Granite's multipliers in config.json and in GGUF: what they are where nothing says them, and what
is refused."""

import pytest

from lmwright.errors import UserError
from lmwright.formats.gguf_names import config_of
from lmwright.formats.hf_read import model_from_config
from lmwright.models.granite import Granite

SIZES = {
    "vocab_size": 97, "embed_dim": 48, "mlp_dim": 80, "num_layers": 2, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 16, "seq_len": 64,
}  # fmt: skip
ALONE = {"architectures": ["GraniteForCausalLM"]}


def test_a_model_without_multipliers_is_a_llama():
    said = Granite(**SIZES).hf.config(Granite(**SIZES))
    assert said["attention_multiplier"] == 0.25
    assert said["embedding_multiplier"] == said["residual_multiplier"] == 1
    again = model_from_config(said, "config.json")
    assert again == Granite(**SIZES, attention_multiplier=0.25)


@pytest.mark.parametrize("value", [0, -8.0, None, "8", True])
def test_other_multipliers_are_refused(value):
    said = Granite(**SIZES).hf.config(Granite(**SIZES)) | {"logits_scaling": value}
    with pytest.raises(UserError, match=r"logits_scaling = .* is not a number above 0"):
        model_from_config(said, "config.json")


def test_a_gguf_file_that_is_silent_is_read_as_llama_cpp_reads_it():
    meta = {"general.architecture": "granite", "granite.attention.key_length": 64}
    config = config_of(meta, {}, "model.gguf")
    assert config["attention_multiplier"] == 0.125 and "residual_multiplier" not in config
