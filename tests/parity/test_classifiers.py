"""Classifiers equal transformers: logits and every gradient, packed here and alone there."""

import json

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.data.tokens.label_sets import set_bits
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.objectives.classify import Classify
from lmwright.objectives.multilabel import Multilabel
from lmwright.objectives.regress import Regress
from tests.in_memory import to_hf
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near, randomize
from tests.parity.families import BERT, DEBERTA, MODERN
from tests.parity.row import GLOBAL, LOCAL, SIZES, rope

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

V, T, LABELS = SIZES["vocab_size"], 25, ("no", "maybe", "yes")
LENGTHS = ([11, 9, 5], [25], [3, 7, 8, 1], [])  # of the documents of each row


EURO = SIZES | {"rope_parameters": rope(), "attention_bias": True, "num_hidden_layers": 2}
THETAS = {GLOBAL: rope(), LOCAL: {"rope_type": "default", "rope_theta": 301.0}}
THEIRS = SIZES | MODERN | {"rope_parameters": THETAS, "num_hidden_layers": 3}
BIASES = dict.fromkeys(("norm_bias", "classifier_bias", "mlp_bias"), True)
HEADS = {
    "EuroBert bos": EURO, "EuroBert mean": EURO, "EuroBert late": EURO,
    "DebertaV2 cls": SIZES | DEBERTA | {"num_hidden_layers": 2},
    "Bert cls": SIZES | BERT | {"num_hidden_layers": 2},
    "XLMRoberta cls": SIZES | BERT | {"num_hidden_layers": 2},
    "ModernBert cls": THEIRS, "ModernBert mean": THEIRS | BIASES,
}  # fmt: skip


def pair(name, labels=LABELS):
    """(their model with random weights, ours, the same weights); without labels for one number."""
    kind, _, pooling = name.partition(" ")
    said = {k: v for k, v in HEADS[name].items() if v is not None}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        **said, classifier_pooling=pooling, id2label=dict(enumerate(labels or ["number"]))
    )
    cls = getattr(transformers, f"{kind}ForSequenceClassification")
    config.architectures = [cls.__name__]
    theirs = cls._from_config(config, attn_implementation="eager").float().eval()
    randomize(theirs)
    saved = json.loads(config.to_json_string(use_diff=False))
    model = model_from_config(saved, "config.json")
    assert model.labels == labels and model.pooling == pooling
    return theirs, model, from_hf(model, {k: v.numpy() for k, v in theirs.state_dict().items()})


def documents(label):
    rng = np.random.default_rng(4)
    return [[(rng.integers(4, V, n), label(rng)) for n in row] for row in LENGTHS]


def compare(objective, theirs, model, w, rows, dtype, labels=None, batch=None, criterion=None):
    """Their mean loss of each document alone (or torch's `criterion` of their logits), left out of
    the others' way by their padding mask, and ours of packed rows: value, logits and every
    gradient; returns the largest difference."""
    flat = [document for row in rows for document in row]
    width = max(len(text) for text, _ in flat)
    ids, mask = (torch.zeros((len(flat), width), dtype=torch.long) for _ in range(2))
    for i, (text, _) in enumerate(flat):
        ids[i, : len(text)], mask[i, : len(text)] = torch.tensor(text), 1
    labels = torch.tensor([y for _, y in flat] if labels is None else labels, dtype=dtype)
    out = theirs(input_ids=ids, attention_mask=mask, labels=labels)
    wanted = criterion(out.logits, labels) if criterion else out.loss
    wanted.backward()
    batch, keys = batch or packed(rows, T), jax.random.split(jax.random.key(5), 4)

    def loss(w):
        made = objective.loss(model.encoder, w, batch, keys, Compute())
        return made.total / made.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(w)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    logits = jax.jit(lambda w: model.classify(w, batch, Compute())[0])(w)
    ours = np.concatenate([logits[i, : len(row)] for i, row in enumerate(rows)])
    found = [assert_near(ours, out.logits.detach().numpy(), "logits")]
    made, named = to_hf(model, grads), dict(theirs.named_parameters())
    assert set(made) == set(named)
    found += [assert_near(made[path], p.grad.numpy(), path) for path, p in named.items()]
    return float(max(found))


@pytest.mark.parametrize("name", HEADS)
def test_logits_and_gradients(name, record_property):
    theirs, model, w = pair(name)
    objective = Classify(labels=LABELS, pooling=model.pooling)
    rows = documents(lambda rng: int(rng.integers(3)))
    record_property("gradients", compare(objective, theirs, model, w, rows, torch.long))


def test_weights_of_classes_and_smoothing():
    """The loss is torch's, divided by the weights of the labels."""
    theirs, model, w = pair("EuroBert bos")
    said = {"class_weights": (0.3, 1.0, 4.0), "label_smoothing": 0.1}
    objective = Classify(labels=LABELS, pooling="bos", **said)
    criterion = torch.nn.CrossEntropyLoss(torch.tensor([0.3, 1.0, 4.0]), label_smoothing=0.1)
    rows = documents(lambda rng: int(rng.integers(3)))
    compare(objective, theirs, model, w, rows, torch.long, criterion=criterion)


@pytest.mark.parametrize("name", ["EuroBert late", "ModernBert cls"])
def test_numbers(name, record_property):
    """The loss is transformers' mean squared error."""
    theirs, model, w = pair(name, ())
    rows = documents(lambda rng: float(rng.normal(2, 3)))
    objective = Regress(pooling=model.pooling)
    record_property("gradients", compare(objective, theirs, model, w, rows, torch.float32))


def sets_of_20():
    """Documents of each row without a label, the batch with some of 20 classes beside the tokens,
    and the classes of each document, bool [N, 20]."""
    rng = np.random.default_rng(6)
    rows = documents(lambda rng: 0)
    batch, hot = packed(rows, T), []
    weight = np.zeros(batch.tokens.shape, np.float32)
    for number, row in enumerate(rows):
        for place, (text, _) in enumerate(row):
            hot.append((rng.random(20) < 0.3) & (np.arange(20) < 16 * len(text)))
            here = batch.segment_ids[number] == place + 1
            weight[number, here] = set_bits(np.flatnonzero(hot[-1]).tolist(), len(text))
    return rows, Batch(batch.tokens, batch.segment_ids, batch.positions, weight), np.array(hot)


TWENTY = tuple(f"class {i}" for i in range(20))


@pytest.mark.parametrize("name", ["EuroBert bos", "ModernBert mean"])
def test_any_number_of_classes(name, record_property):
    """The loss is transformers' of a multi-label problem, 20 classes beside the tokens."""
    theirs, model, w = pair(name, TWENTY)
    theirs.config.problem_type = "multi_label_classification"
    objective = Multilabel(labels=TWENTY, pooling=model.pooling)
    rows, batch, hot = sets_of_20()
    found = compare(objective, theirs, model, w, rows, torch.float32, hot, batch)
    record_property("gradients", found)


def test_weights_of_texts_that_have_a_class():
    """The loss is torch's with `pos_weight`."""
    theirs, model, w = pair("EuroBert bos", TWENTY)
    theirs.config.problem_type = "multi_label_classification"
    weights = tuple(np.random.default_rng(7).uniform(0.25, 10, len(TWENTY)).tolist())
    objective = Multilabel(labels=TWENTY, pooling="bos", positive_weights=weights)
    rows, batch, hot = sets_of_20()
    criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))
    compare(objective, theirs, model, w, rows, torch.float32, hot, batch, criterion)
