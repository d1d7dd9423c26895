"""BitNet against transformers' class, whose linear layers round: logits, loss, gradients, text."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from lmwright.core.param import count_params
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.presets import of_section
from tests.parity.compare import (
    assert_same_text,
    assert_same_training,
    randomize,
)
from tests.parity.row import SIZES, rope

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(3, 97, (2, 9))  # few: one value in 40,000 lies so close
# between two integers that sums in another order round it otherwise
ONLINE = {
    "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
}  # fmt: skip
SAID = SIZES | {
    "head_dim": 8, "rope_parameters": rope(), "tie_word_embeddings": True, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def not_compiled():
    """Their rounding is compiled otherwise, which needs a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def theirs_of(said, mode="online"):
    """Their model with linear layers that round."""
    from transformers.integrations import replace_with_bitnet_linear

    config = transformers.BitNetConfig(**said)
    theirs = transformers.BitNetForCausalLM._from_config(config, attn_implementation="eager")
    how = SimpleNamespace(
        linear_class="autobitlinear", quantization_mode=mode, use_rms_norm=False, rms_norm_eps=1e-6
    )
    replace_with_bitnet_linear(theirs, ["lm_head"], how)
    theirs.to_empty(device="cpu")
    fresh = transformers.BitNetForCausalLM._from_config(config, attn_implementation="eager")
    theirs.load_state_dict(fresh.state_dict(), strict=False)
    theirs.model.rotary_emb = fresh.model.rotary_emb
    theirs.tie_weights()
    return theirs.float().eval()


@cache
def problem(act):
    """(their model with random weights, our model, the same weights)."""
    torch.manual_seed(0)
    said = SAID | {"hidden_act": act}
    theirs = theirs_of(said)
    randomize(theirs)
    saved = json.loads(theirs.config.to_json_string(use_diff=False))
    saved |= {"architectures": ["BitNetForCausalLM"], "quantization_config": ONLINE}
    model = model_from_config(saved, "config.json")
    tensors = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    return theirs, model, from_hf(model, tensors)


@pytest.mark.parametrize("act", ["relu2", "silu"])
def test_logits_loss_and_gradients(act, record_property):
    theirs, model, w = problem(act)
    assert_same_training(theirs, model, w, TOKENS, record_property)


def test_text_of_a_left_padded_batch():
    theirs, model, w = problem("silu")
    assert_same_text(theirs, model, w)


def test_published_count():
    """Of the 2B model, whose safetensors are packed."""
    model = of_section("model")["bitnet-b1.58-2b-4t"]()
    said = {k: v for k, v in model.hf.config(model).items() if k != "quantization_config"}
    with torch.device("meta"):  # shapes without memory
        theirs = transformers.BitNetForCausalLM(transformers.BitNetConfig(**said))
    theirs.tie_weights()
    assert count_params(model.spec()) == theirs.num_parameters() == 2_412_820_480
