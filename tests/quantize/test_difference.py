"""The figures that `quantize` tells of a rounded model equal those of torch and transformers."""

import copy
import math

import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.param import map_params
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.proof import logits
from lmwright.quantize import difference
from lmwright.quantize.difference import compare
from lmwright.quantize.layers import Weights
from tests.objectives.test_embed import MODEL as ENCODER
from tests.parity.compare import in_files
from tests.parity.test_families import TOKENS, problem

torch = pytest.importorskip("torch", reason="torch is the reference")


@pytest.mark.parametrize("by_layers", [True, False])
def test_figures_are_those_of_torch(by_layers, monkeypatch):
    _, theirs, model, w = problem("llama")
    rounded = copy.deepcopy(theirs)
    with torch.no_grad():
        for param in rounded.parameters():  # norms and tables, too
            param.copy_(torch.round(param * 16) / 16)
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        before, after = (m(input_ids=ids, labels=ids) for m in (theirs, rounded))
    p, q = (out.logits.double().log_softmax(-1) for out in (before, after))
    kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item() / ids.numel()
    greedy = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert kl > 0.01 and 0.1 < greedy < 0.99

    tensors = {name: tensor.numpy() for name, tensor in rounded.state_dict().items()}
    both = w, from_hf(model, in_files(model, tensors))
    weights = tuple(Weights(model, HfTensors(model, each)) for each in both)
    if not by_layers:
        monkeypatch.setattr(difference, "goes_by_layers", lambda model: False)
    found = compare(model, weights, TOKENS.astype(np.int32), Compute())
    assert found.tokens == ids.numel()
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.greedy == pytest.approx(greedy, abs=1e-6)
    losses = before.loss.item(), after.loss.item()
    assert found.perplexities == pytest.approx([math.exp(loss) for loss in losses], rel=1e-4)
    assert compare(model, weights[:1] * 2, TOKENS.astype(np.int32), Compute()).greedy == 1


def test_an_encoder_has_no_perplexity_and_sees_both_ways():
    """The same difference as of whole passes, whose attention is not causal."""
    rng = np.random.default_rng(0)
    one, other = (
        map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3, ENCODER.spec())
        for _ in range(2)
    )
    rows = rng.integers(0, ENCODER.vocab_size, (2, 8)).astype(np.int32)
    weights = tuple(Weights(ENCODER, HfTensors(ENCODER, each)) for each in (one, other))
    found = compare(ENCODER, weights, rows, Compute())
    p, q = (logits(ENCODER, each, rows).astype(np.float64) for each in (one, other))
    p, q = (a - np.log(np.exp(a).sum(-1, keepdims=True)) for a in (p, q))
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    assert found.perplexities is None and "perplexity" not in found.line()
