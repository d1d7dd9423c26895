"""Answerers equal transformers' models for question answering: logits, loss and every gradient,
packed here and alone there."""

import json

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.answer_spans import Answer
from tests.in_memory import to_hf
from tests.labeled_run import SIZES
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near, randomize
from tests.parity.test_classifiers import HEADS, LENGTHS, T, V

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

KINDS = ("ModernBert mean", "DebertaV2 cls", "XLMRoberta cls")
OBJECTIVE = Answer(window_tokens=24, window_overlap=5)


def pair(name):
    """(their model with random weights, ours, the same weights)."""
    kind = name.split()[0]
    said = {k: v for k, v in HEADS[name].items() if v is not None}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**said)
    cls = getattr(transformers, f"{kind}ForQuestionAnswering")
    config.architectures = [cls.__name__]
    theirs = cls._from_config(config, attn_implementation="eager").float().eval()
    randomize(theirs)
    model = model_from_config(json.loads(config.to_json_string(use_diff=False)), "config.json")
    return theirs, model, from_hf(model, {k: v.numpy() for k, v in theirs.state_dict().items()})


def questions():
    """Documents of each row: (ids, first token of the answer, last one); some have none."""
    rng = np.random.default_rng(4)
    rows = []
    for row in LENGTHS:
        spans = (sorted(rng.integers(0, n, 2)) if rng.random() < 0.7 else (0, 0) for n in row)
        rows.append([(rng.integers(4, V, n), *span) for n, span in zip(row, spans, strict=True)])
    return rows


def batch_of(rows):
    batch = packed([[(ids, 0) for ids, *_ in row] for row in rows], T)
    weight = np.zeros(batch.tokens.shape, np.float32)
    for number, row in enumerate(rows):
        at = 0
        for ids, first, last in row:
            weight[number, at + first] += 1
            weight[number, at + last] += 2
            weight[number, at] += 4 * (len(ids) > 1)  # where the context begins is not learned
            at += len(ids)
    return Batch(batch.tokens, batch.segment_ids, batch.positions, weight)


@pytest.mark.parametrize("name", KINDS)
def test_logits_loss_and_gradients(name, record_property):
    """Their losses are those of a softmax over a row, so each document is alone in one. Rows of
    padding alone have finite gradients."""
    theirs, model, w = pair(name)
    rows = questions()
    flat = [document for row in rows for document in row]
    wanted, losses, right = [], [], 0
    for ids, first, last in flat:
        out = theirs(
            input_ids=torch.tensor(ids[None]),
            start_positions=torch.tensor([first]),
            end_positions=torch.tensor([last]),
        )
        losses.append(out.loss)
        scores = torch.stack([out.start_logits, out.end_logits], -1)[0].detach().numpy()
        right += tuple(scores.argmax(0)) == (first, last)
        wanted.append(scores)
    mean = torch.stack(losses).mean()
    mean.backward()
    batch, keys = batch_of(rows), jax.random.split(jax.random.key(5), 4)

    def loss(w, batch):
        made = OBJECTIVE.loss(model.encoder, w, batch, keys, Compute())
        logits = model.logits(w, model.hidden(w, batch, Compute())[0])
        return made.total, (made, logits)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (made, logits)), grads = run(w, batch)
    assert made.weight == len(flat)
    np.testing.assert_allclose(total / made.weight, mean.item(), rtol=1e-5)
    grads = jax.tree.map(lambda g: g / made.weight, grads)
    assert made.metrics["accuracy"][0] == right
    ours = np.asarray(logits)[np.asarray(batch.segment_ids) > 0]
    found = [assert_near(ours, np.concatenate(wanted), "logits")]
    named, gradients = dict(theirs.named_parameters()), to_hf(model, grads)
    assert set(gradients) == set(named)
    largest = max(p.grad.abs().max().item() for p in named.values())
    for path, p in named.items():
        # a softmax does not see what all tokens share, such as the bias of the layer of scores
        if p.grad.abs().max().item() > 1e-6 * largest:
            found.append(assert_near(gradients[path], p.grad.numpy(), path))
        else:
            assert path.endswith("bias") and np.abs(gradients[path]).max() <= 1e-6 * largest
    record_property("gradients", float(max(found)))
    (total, (made, _)), grads = run(w, batch_of([[] for _ in rows]))  # nothing but padding
    assert total == 0 and made.weight == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", KINDS)
def test_a_config_is_read_as_it_was_written(name):
    _, model, _ = pair(name)
    assert model.max_answer_tokens == 30 and model.no_answer == "allowed"
    made = Answer(window_tokens=20, window_overlap=4, max_answer_tokens=7, no_answer="never")
    model = made.model_over(model.encoder)
    config = model.hf.config(model)
    assert model_from_config(config, "config.json") == model
    config["task_specific_params"]["question-answering"]["doc_stride"] = -1
    with pytest.raises(UserError, match=r"config.json: question-answering has doc_stride = -1"):
        model_from_config(config, "config.json")


def test_what_is_refused():
    with pytest.raises(UserError, match=r"window_overlap: 30 is too large .* use at most 14"):
        Answer(window_tokens=32, window_overlap=30)
    with pytest.raises(UserError, match=r"'eurobert' cannot answer questions, .* use 'modernbert'"):
        OBJECTIVE.spec(EuroBert(mlp_dim=24, **SIZES))
