"""Encoders equal transformers: loss and every gradient of masked tokens, alone and packed."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.objectives.mlm import Mlm
from tests.in_memory import to_hf
from tests.parity.compare import assert_near, randomize
from tests.parity.families import BERT, DEBERTA, MODERN
from tests.parity.row import GLOBAL, LOCAL, SIZES, rope

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

MASK, EOS, V = 3, 2, SIZES["vocab_size"]
OBJECTIVE = Mlm(
    mask_token_id=MASK, mask_ratio=0.4, random_share=0.1, kept_share=0.2, never_masked=(EOS,)
)
LENGTHS = ([11, 9, 5], [25], [3, 7, 8, 7], [0])  # of the documents of each row; the rest is padding
T = 25


THETAS = {GLOBAL: rope(), LOCAL: {"rope_type": "default", "rope_theta": 301.0}}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias")
ENCODERS = {
    "EuroBert": SIZES | {"rope_parameters": rope(), "attention_bias": True},
    # which forgets the gradient of padding's row, an id that no document has
    "ModernBert": SIZES | MODERN | {"rope_parameters": THETAS},
    "DebertaV2": SIZES | DEBERTA,
    "Bert": SIZES | BERT | {"sep_token_id": 40, "pad_token_id": None},
    "Bert with one type": SIZES | BERT | {
        "hidden_act": "relu", "type_vocab_size": 1, "pad_token_id": None,
    },
    "Roberta": SIZES | BERT | {"type_vocab_size": 1, "pad_token_id": 0},
    "XLMRoberta": SIZES | BERT | {"pad_token_id": 1},
    "ModernBert with biases": SIZES | MODERN | {
        "rope_parameters": THETAS, "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL],
        **dict.fromkeys(BIASES, True), "tie_word_embeddings": False, "local_attention": 9,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request):
    """(their model with random weights, ours, the same weights)."""
    return encoder_of(request.param)


def encoder_of(name):
    """(their model of a row of the table with random weights, ours, the same weights)."""
    kind = name.partition(" ")[0]
    said = {k: v for k, v in ENCODERS[name].items() if v is not None}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**said)
    config.architectures = [f"{kind}ForMaskedLM"]
    cls = getattr(transformers, f"{kind}ForMaskedLM")
    theirs = cls._from_config(config, attn_implementation="eager").float().eval()
    randomize(theirs)
    saved = json.loads(config.to_json_string(use_diff=False))
    model = model_from_config(saved, "config.json")
    return theirs, model, from_hf(model, {k: v.numpy() for k, v in theirs.state_dict().items()})


def packed(lengths):
    """A batch of rows of documents that end in EOS."""
    draws = np.random.default_rng(4)
    tokens, ids, places = (np.zeros((len(lengths), T), np.int32) for _ in range(3))
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, 1):
            at = slice(start, start + length)
            tokens[row, at] = [*draws.integers(4, V, max(length - 1, 0)), *[EOS] * bool(length)]
            ids[row, at], places[row, at] = number, np.arange(length)
            start += length
    arrays = map(jnp.asarray, (tokens, ids, places, (ids > 0).astype(np.float32)))
    return Batch(*arrays)


def bias_of(seen):
    """What is added to scores [B, 1, T, S] so that only these count."""
    return torch.tensor(np.where(seen, 0.0, -1e30)[:, None], dtype=torch.float32)


def their_loss(theirs, batch, hidden):
    """Their mean loss of the hidden tokens, each document seeing itself alone."""
    ids = np.asarray(batch.segment_ids)
    same = ids[:, :, None] == ids[:, None]
    labels = np.full(ids.shape, -100)
    for row, (places, predicted) in enumerate(zip(hidden.places, hidden.predicted, strict=True)):
        chosen = np.asarray(places)[np.asarray(predicted) > 0]
        labels[row, chosen] = np.asarray(batch.tokens)[row, chosen]
    logits = their_logits(theirs, torch.tensor(np.asarray(hidden.tokens)), same, batch.positions)
    flat = logits.reshape(-1, V), torch.tensor(labels).reshape(-1).long()
    return torch.nn.functional.cross_entropy(*flat)


def their_logits(theirs, tokens, same, positions):
    """Their logits, where tokens see those that are the `same` [B, T, T]."""
    if theirs.config.model_type == "deberta-v2":  # whose whole model takes no mask of pairs
        parts = theirs.deberta
        x = parts.encoder(parts.embeddings(tokens), torch.tensor(same)).last_hidden_state
        return theirs.lm_predictions(x, parts.embeddings.word_embeddings)
    mask = bias_of(same)
    if theirs.config.model_type == "modernbert":
        places = np.arange(T)
        near = abs(places[:, None] - places) <= theirs.config.local_attention // 2
        mask = {GLOBAL: mask, LOCAL: bias_of(same & near)}
    places = torch.tensor(np.asarray(positions))
    if theirs.config.model_type == "bert":
        types = types_of(tokens, np.asarray(positions), theirs.config)
        return theirs(
            input_ids=tokens, attention_mask=mask, position_ids=places, token_type_ids=types
        ).logits
    if "roberta" in theirs.config.model_type:
        places = places + theirs.config.pad_token_id + 1
    return theirs(input_ids=tokens, attention_mask=mask, position_ids=places).logits


def types_of(tokens, positions, config):
    """1 for tokens behind a separator in their document, else 0."""
    types, behind = torch.zeros_like(tokens), False
    for row in range(tokens.shape[0]):
        for at in range(tokens.shape[1]):
            behind = behind and positions[row, at] > 0
            types[row, at] = int(behind)
            behind = behind or int(tokens[row, at]) == getattr(config, "sep_token_id", None)
    return types


def test_loss_and_gradients(encoder, record_property):
    theirs, model, w = encoder
    batch, keys = packed(LENGTHS), jax.random.split(jax.random.key(5), len(LENGTHS))

    def loss(w):
        result = OBJECTIVE.loss(model, w, batch, keys, Compute(loss_chunk_tokens=4))
        return result.total / result.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(w)
    hidden = OBJECTIVE.hide(batch, V, keys)
    assert np.sum(hidden.predicted) == sum(round(0.4 * (sum(d) - len(d))) for d in LENGTHS[:3])
    theirs.zero_grad()
    expected = their_loss(theirs, batch, hidden)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    ours, named = to_hf(model, grads), dict(theirs.named_parameters())
    if (tied := "lm_head.decoder.weight") in named:
        named["roberta.embeddings.word_embeddings.weight"] = named.pop(tied)
    assert set(ours) == set(named)
    found = [assert_near(ours[path], p.grad.numpy(), path) for path, p in named.items()]
    record_property("gradients", float(max(found)))


def test_rows_of_padding_alone_have_finite_gradients(encoder):
    _, model, w = encoder
    batch, keys = packed([[0], [0]]), jax.random.split(jax.random.key(5), 2)
    loss = lambda w: OBJECTIVE.loss(model, w, batch, keys, Compute())  # noqa: E731
    total, grads = jax.jit(jax.value_and_grad(lambda w: loss(w).total))(w)
    assert total == 0 and float(loss(w).weight) == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_packed_documents_are_as_alone(encoder, kernels):
    _, model, w = encoder
    compute, lengths = Compute(kernels=kernels), LENGTHS[0]
    batch = packed([lengths])
    hidden = jax.jit(lambda w, b: model.hidden(w, b, compute)[0])
    whole, start = hidden(w, batch), 0
    for length in lengths:
        at = slice(start, start + length)
        alone = replace(
            batch, tokens=batch.tokens[:, at], segment_ids=jnp.ones((1, length), jnp.int32),
            positions=batch.positions[:, at], loss_weight=batch.loss_weight[:, at],
        )  # fmt: skip
        assert_near(whole[:, at], np.asarray(hidden(w, alone)), f"document of {length}")
        start += length
