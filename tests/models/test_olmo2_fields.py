"""Fields of OLMo that nothing would read are refused."""

import pytest

from lmwright.errors import UserError
from lmwright.models.olmo2 import Olmo2

SIZES = {
    "vocab_size": 32, "embed_dim": 8, "mlp_dim": 8, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 2, "head_dim": 4, "seq_len": 16,
}  # fmt: skip


@pytest.mark.parametrize("said", [{"layer_pattern": ("global",)}, {"local_rope_theta": 7.0}])
def test_what_only_a_window_reads_needs_one(said):
    assert Olmo2(**SIZES, **said, window=4).windows
    with pytest.raises(UserError, match=f"model.{next(iter(said))}: has no effect without"):
        Olmo2(**SIZES, **said)
