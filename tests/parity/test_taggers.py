"""Taggers equal transformers' token classifiers: logits and every gradient, packed here and alone
there, of words of several tokens."""

import json

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.objectives.tag import Tag
from tests.in_memory import to_hf
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near, randomize
from tests.parity.test_classifiers import HEADS, LENGTHS, T, V

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

LABELS = ("O", "B-PER", "I-PER", "B-LOC")
KINDS = ("EuroBert bos", "ModernBert mean", "DebertaV2 cls", "Bert cls")


def pair(name):
    """(their model with random weights, ours, the same weights, their config.json)."""
    kind = name.split()[0]
    said = {k: v for k, v in HEADS[name].items() if v is not None}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**said, id2label=dict(enumerate(LABELS)))
    cls = getattr(transformers, f"{kind}ForTokenClassification")
    config.architectures = [cls.__name__]
    theirs = cls._from_config(config, attn_implementation="eager").float().eval()
    randomize(theirs)
    saved = json.loads(config.to_json_string(use_diff=False))
    model = model_from_config(saved, "config.json")
    assert model.labels == LABELS
    return theirs, model, from_hf(model, {k: v.numpy() for k, v in theirs.state_dict().items()})


def tagged():
    """Documents of each row: (ids, tag of each token, -100 for all but the first of a word)."""
    rng = np.random.default_rng(4)
    rows = []
    for row in LENGTHS:
        made = []
        for n in row:
            tags = np.where(rng.random(n) < 0.6, rng.integers(0, len(LABELS), n), -100)
            made.append((rng.integers(4, V, n), tags))
        rows.append(made)
    return rows


def batch_of(rows):
    batch = packed([[(ids, 0) for ids, _ in row] for row in rows], T)
    weight = np.zeros(batch.tokens.shape, np.float32)
    for number, row in enumerate(rows):
        tags = np.concatenate([tags for _, tags in row]) if row else np.zeros(0)
        weight[number, : len(tags)] = np.maximum(tags + 1, 0)
    return Batch(batch.tokens, batch.segment_ids, batch.positions, weight)


SAID = {"class_weights": (0.2, 1.0, 1.5, 3.0), "label_smoothing": 0.1}


PLAIN = [pytest.param(name, {}, id=name) for name in KINDS]


@pytest.mark.parametrize("name, said", [*PLAIN, pytest.param(KINDS[0], SAID, id="weights")])
def test_logits_and_gradients(name, said, record_property):
    """With weights and smoothing, the loss is torch's of their logits."""
    theirs, model, w = pair(name)
    rows, objective = tagged(), Tag(labels=LABELS, **said)
    flat = [document for row in rows for document in row]
    shape = (len(flat), max(len(ids) for ids, _ in flat))
    ids, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    labels = torch.full(shape, -100)
    for i, (text, tags) in enumerate(flat):
        ids[i, : len(text)], mask[i, : len(text)] = torch.tensor(text), 1
        labels[i, : len(text)] = torch.tensor(tags)
    out = theirs(input_ids=ids, attention_mask=mask, labels=labels)
    given = torch.tensor(objective.class_weights or [1.0] * len(LABELS))
    torch_loss = torch.nn.CrossEntropyLoss(given, label_smoothing=objective.label_smoothing)
    wanted = torch_loss(out.logits.flatten(0, 1), labels.flatten()) if said else out.loss
    wanted.backward()
    batch, keys = batch_of(rows), jax.random.split(jax.random.key(5), 4)

    def loss(w):
        made = objective.loss(model.encoder, w, batch, keys, Compute())
        logits = model.logits(w, model.hidden(w, batch, Compute())[0])
        return made.total / made.weight, (made, logits)

    (value, (made, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    assert made.metrics["nll"][1] == sum((tags >= 0).sum() for _, tags in flat)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    ours = np.asarray(logits)[np.asarray(batch.segment_ids) > 0]
    logits = out.logits.detach().numpy()[mask.numpy() > 0]
    right = (logits.argmax(-1) == np.concatenate([tags for _, tags in flat])).sum()
    assert made.metrics["accuracy"][0] == right
    found = [assert_near(ours, logits, "logits")]
    named, gradients = dict(theirs.named_parameters()), to_hf(model, grads)
    assert set(gradients) == set(named)
    found += [assert_near(gradients[path], p.grad.numpy(), path) for path, p in named.items()]
    if not said:
        record_property("gradients", float(max(found)))


@pytest.mark.parametrize("name", KINDS)
def test_a_config_is_read_as_it_was_written(name):
    _, model, _ = pair(name)
    assert model_from_config(model.hf.config(model), "config.json") == model
    for wrong in ({"0": "O", "2": "B-PER"}, ["O", "B-PER"], 3):
        config = model.hf.config(model) | {"id2label": wrong}
        with pytest.raises(UserError, match="does not number the tags from 0"):
            model_from_config(config, "config.json")


def test_rows_of_padding_alone_have_finite_gradients():
    _, model, w = pair(KINDS[0])
    batch, objective = batch_of([[], []]), Tag(labels=LABELS)

    def loss(w):
        made = objective.loss(model.encoder, w, batch, jax.random.split(jax.random.key(0), 2),
                              Compute())  # fmt: skip
        return made.total, made.weight

    (total, weight), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    assert total == 0 and weight == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def test_what_is_refused():
    with pytest.raises(UserError, match="'O' occurs twice"):
        Tag(labels=("O", "B-PER", "O"))
    with pytest.raises(UserError, match="' O' is empty or has spaces"):
        Tag(labels=(" O", "B-PER"))
