"""Continuations of a context that is read once, and contexts whose beginning is read once, score as
in rows of their own."""

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.copies import computing_with, copies_shardings
from lmwright.evals import likelihood, prefixes, shared_contexts
from lmwright.evals.likelihood import log_likelihoods
from lmwright.formats.proof import logits
from tests.sharded.problem import VOCAB, fresh_weights
from tests.sharded.test_experts import BIASED, NEXT, OSS
from tests.sharded.test_sharded_families import MODELS

DECODERS = MODELS | {"gpt-oss": OSS, "deepseek-v3": BIASED, "qwen3-next": NEXT}
ENCODERS = ("modernbert", "deberta", "bert", "eurobert")
OTHERS = ("xlstm", "xlstm-blocks", "qwen3-5", "qwen3-next", "phi3")  # memories, and a longrope
QUICK = ("gemma2", "gpt2")  # windows, and learned positions
COMPUTE = Compute(precision="fp32", kernels="cpu")


def asked():
    """Contexts of several lengths with continuations of one and more tokens, and others alone."""
    rng = np.random.default_rng(0)
    ids = lambda most: rng.integers(0, VOCAB, rng.integers(1, most)).tolist()  # noqa: E731
    pairs = []
    for size in (5, 17, 30, 17):
        context = rng.integers(0, VOCAB, size).tolist()
        pairs += [(context, ids(9)) for _ in range(4)] + [(context, [int(rng.integers(VOCAB))])]
    pairs += [(ids(20), ids(9)) for _ in range(3)]
    for begin in (rng.integers(0, VOCAB, size).tolist() for size in (12, 19)):
        for each in ([], ids(9), ids(9), ids(3)):  # the beginning itself, too
            pairs += [(begin + each, ids(5)) for _ in range(3)]
        pairs += [(begin + ids(9), [token]) for token in (3, 4)]
    pairs += [(pairs[6][0] * 3, ids(4)), (pairs[6][0] * 3, ids(6))]  # longer than the context
    return [pairs[i] for i in rng.permutation(len(pairs))]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in DECODERS
        if name not in ENCODERS
    ],
)
def test_one_reading_of_a_context_is_enough(name, monkeypatch):
    model, pairs, done = DECODERS[name], asked(), []
    w = jax.tree.map(np.asarray, fresh_weights(model))
    monkeypatch.setattr(prefixes, "SHORTEST", 8)
    shared = shared_contexts.shared_of(model, pairs)
    assert {each.prefix for each in shared} == (set() if name in OTHERS else {0, 11, 18})
    found = log_likelihoods(model, w, pairs, COMPUTE, done.append)
    assert sum(done) == len(pairs)
    monkeypatch.setattr(likelihood, "shared_of", lambda *_: [])
    rows = log_likelihoods(model, w, pairs, COMPUTE)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in rows], atol=1e-4)
    assert [a for _, a in found] == [a for _, a in rows]


def test_a_long_context_keeps_as_many_tokens_as_the_model_reads():
    """All but the last token of the row are read, as in the harness's own model."""
    model, rng = DECODERS["gpt2"], np.random.default_rng(0)
    w, size = fresh_weights(model), model.seq_len
    pairs = [
        (rng.integers(0, VOCAB, size + 7).tolist(), rng.integers(0, VOCAB, num).tolist())
        for num in (1, 3, size)
    ]
    found = log_likelihoods(model, w, pairs, COMPUTE)
    for (context, said), (total, _) in zip(pairs, found, strict=True):
        whole = np.asarray(context + said)[-size - 1 :]
        rows = logits(model, w, whole[None, :-1])[0].astype(np.float64)[-len(said) :]
        logps = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        assert total == pytest.approx(logps[np.arange(len(said)), said].sum(), abs=1e-4)


def test_devices_with_all_weights_score_alike(monkeypatch):
    """Batches are dealt out to them, also where there are fewer rows than devices."""
    model, pairs = DECODERS["gpt2"], asked()
    w = fresh_weights(model)
    monkeypatch.setattr(prefixes, "SHORTEST", 8)
    wanted = log_likelihoods(model, w, pairs, COMPUTE)
    whole = jax.device_put(w, copies_shardings(model.spec(), 3))
    with computing_with(whole):
        found = log_likelihoods(model, whole, pairs, COMPUTE)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in wanted], atol=1e-4)
    assert [a for _, a in found] == [a for _, a in wanted]
