"""Whatever biases a family can have, config.json says them."""

from typing import get_args, get_type_hints

import pytest

from lmwright.formats.hf_read import model_from_config
from lmwright.models import KINDS

SIZES = {
    "vocab_size": 97, "embed_dim": 48, "mlp_dim": 80, "num_layers": 2, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 8, "seq_len": 64,
}  # fmt: skip
CASES = [
    (kind, bias)
    for kind in ("llama", "olmo2", "smollm3", "granite", "eurobert")
    for bias in get_args(get_type_hints(KINDS[kind])["bias"])
]


@pytest.mark.parametrize("kind, bias", CASES)
def test_biases_are_written_and_read(kind, bias):
    model = KINDS[kind](**SIZES, bias=bias)
    assert model_from_config(model.hf.config(model), "config.json").bias == bias
