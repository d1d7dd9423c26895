"""The license of weights goes with them into the card of what is made from them."""

import numpy as np
import pytest

from lmwright.core.param import map_params
from lmwright.formats.card import UNLICENSED, published_card
from lmwright.formats.card_license import license_of
from lmwright.formats.convert import import_command
from lmwright.models.xlstm import Xlstm
from tests.in_memory import export_hf

MODEL = Xlstm(
    vocab_size=40, embed_dim=64, mlp_dim=128, num_layers=1, num_heads=2, key_dim=16, head_dim=32,
    seq_len=32,
)  # fmt: skip
NXAI = """---
language: en
license: other
license_name: nxai-community
license_link: https://huggingface.co/NX-AI/xLSTM-7b/blob/main/LICENSE
---
license: in the text it means nothing
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng, out = np.random.default_rng(0), tmp_path_factory.mktemp("theirs") / "model"
    export_hf(MODEL, map_params(lambda p: rng.normal(0, 0.1, p.shape).astype("f4"), MODEL.spec()),
              None, out)  # fmt: skip
    return out


def test_it_goes_into_the_card(folder, tmp_path):
    assert UNLICENSED in (folder / "README.md").read_text()
    (folder / "README.md").write_text(NXAI)
    import_command(folder, tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    assert license_of(tmp_path / "ours") == license_of(folder) == {
        "license": "other", "license_name": "nxai-community",
        "license_link": "https://huggingface.co/NX-AI/xLSTM-7b/blob/main/LICENSE",
    }  # fmt: skip
    assert "License: [nxai-community](https://huggingface.co/" in card and UNLICENSED not in card
    assert "me/tiny" in published_card(card, "me/tiny", "other")


@pytest.mark.parametrize(
    "text", ["", "license: mit\n", "---\nlicense:\n- mit\n---\n", "---\nlicense: mit\n"]
)
def test_a_card_without_one(tmp_path, text):
    assert license_of(tmp_path) == {}
    (tmp_path / "README.md").write_text(text)
    assert license_of(tmp_path) == {}
