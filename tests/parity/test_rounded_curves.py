"""Fifty steps with weights that compute rounded beside torch: a BitNet as transformers has it, and
a llama on torchao's int4 grid; the same rows and AdamW, from the same weights.

A value that lies between two integers may fall otherwise where sums are in another order, and
training carries that on: the first losses are equal, later ones go apart.
"""

import jax
import numpy as np
import pytest

from lmwright.core.param import init_weights
from lmwright.models.bitnet import BitNet
from lmwright.models.llama import Llama
from lmwright.program.qat_section import Qat
from tests.in_memory import to_hf
from tests.parity.curves import apart, both_curves
from tests.parity.test_bitnet import theirs_of

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

GROUP = 16
FIRST, LARGEST, MEAN = 1e-6, 5e-2, 1e-2  # differences of losses, as shares of them
SIZES = {
    "vocab_size": 97, "embed_dim": 48, "mlp_dim": 80, "num_layers": 2, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 8, "seq_len": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def not_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def rounded(weight):
    """The weight on the grid of int4, whose gradient passes where it is not clipped."""
    blocks = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (blocks.detach().abs().amax(-1, keepdim=True) / 7.5).clamp(min=2.0**-23)
    codes = torch.round(blocks.detach() * (1.0 / scale))
    clipped = codes.clamp(-8, 7)
    own = blocks * (codes == clipped)
    return (own + (clipped * scale - own).detach()).reshape(weight.shape)


class RoundedLinear(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, rounded(self.weight))


def case(kind):
    """(our model, its [qat], theirs)."""
    model = (BitNet if kind == "bitnet" else Llama)(**SIZES, rope_theta=5003.0)
    config = model.hf.config(model)
    config.pop("quantization_config", None)
    if kind == "bitnet":
        return model, None, theirs_of(config)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    for module in theirs.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RoundedLinear
    return model, Qat(weights="int4", group_size=GROUP), theirs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitnet", "int4"])
def test_fifty_steps_are_those_of_torch(kind, record_property):
    model, qat, theirs = case(kind)
    w = init_weights(model.spec(), jax.random.key(1))
    fresh = {name: torch.tensor(np.array(a)) for name, a in to_hf(model, w).items()}
    assert not theirs.load_state_dict(fresh, strict=False).unexpected_keys
    theirs.tie_weights()
    loss = lambda ids: theirs(input_ids=ids, labels=ids).loss  # noqa: E731
    far = apart(both_curves(model, w, theirs.parameters(), loss, qat))
    record_property("largest", float(far.max()))
    record_property("mean", float(far.mean()))
    assert far[0] < FIRST and far.max() < LARGEST and far.mean() < MEAN, far
    assert kind != "bitnet" or far[:5].max() < FIRST, far
