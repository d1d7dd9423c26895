"""Every row of the table equals transformers: logits, loss and gradients, both directions, and
text from left-padded batches."""

import json
from functools import cache

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from tests.in_memory import to_hf
from tests.parity.compare import (
    assert_near,
    assert_same_text,
    assert_same_training,
    in_class,
    in_files,
    make_batch,
    randomize,
)
from tests.parity.families import ROWS

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(3, 97, (2, 29))


def config_of(row, said):
    config = getattr(transformers, row.architecture).config_class(**said)
    config.architectures = [row.architecture]
    return config


def theirs_of(row, said):
    """Their model, in float32 with attention written out."""
    cls = getattr(transformers, row.architecture)
    return cls._from_config(config_of(row, said), attn_implementation="eager").float().eval()


@cache
def problem(name):
    """(row, their model with random weights, our model, the same weights)."""
    row = ROWS[name]
    torch.manual_seed(0)
    theirs = theirs_of(row, row.said)
    randomize(theirs)
    saved = json.loads(config_of(row, row.said).to_json_string(use_diff=False))
    model = model_from_config(saved, "config.json")
    tensors = {k: v.numpy() for k, v in theirs.state_dict().items()}
    return row, theirs, model, from_hf(model, in_files(model, tensors))


def logits_of(model, w, tokens):
    batch = make_batch(tokens)
    return jax.jit(lambda w: model.logits(w, model.hidden(w, batch, Compute())[0]))(w)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.gradients])
def test_logits_loss_and_gradients(name, record_property):
    _, theirs, model, w = problem(name)
    assert_same_training(theirs, model, w, TOKENS, record_property)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.gradients])
def test_logits(name, record_property):
    _, theirs, model, w = problem(name)
    with torch.no_grad():
        out = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()
    near = assert_near(logits_of(model, w, TOKENS), out, "logits")
    record_property("logits", float(near))


@pytest.mark.parametrize("name", ROWS)
def test_export_gives_their_model_again(name):
    """Our config.json and our tensors make a model with the very same logits."""
    row, theirs, model, w = problem(name)
    said = json.loads(json.dumps(model.hf.config(model)))
    assert said.pop("architectures") == [row.architecture]
    again = theirs_of(row, said)
    tensors = {k: torch.tensor(v) for k, v in in_class(model, to_hf(model, w)).items()}
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight", "decoder.weight"}
    again.tie_weights()
    with torch.no_grad():
        ids = torch.tensor(TOKENS)
        assert torch.equal(again(input_ids=ids).logits, theirs(input_ids=ids).logits)
    with_architecture = said | {"architectures": [row.architecture]}
    assert model_from_config(with_architecture, "config.json") == model


@pytest.mark.parametrize("name", ROWS)
def test_a_short_config_is_the_whole_one(name):
    """What config.json leaves out is what transformers fills in."""
    row, _, model, _ = problem(name)
    short = row.said | {"architectures": [row.architecture]}
    assert model_from_config(short, "config.json") == model


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.generates])
def test_text_of_a_left_padded_batch(name):
    _, theirs, model, w = problem(name)
    assert_same_text(theirs, model, w)
