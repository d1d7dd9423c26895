"""Models over an encoder have what the contract asks of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, HfModel, Model
from lmwright.core.param import init_weights
from lmwright.models.answerer import Answerer
from lmwright.models.classifier import Classifier
from lmwright.models.deberta import Deberta
from lmwright.models.detector import Detector
from lmwright.models.embedder import Embedder
from lmwright.models.mask_decoder import MaskDecoder
from lmwright.models.over import encoder_of
from lmwright.models.tagger import Tagger

ENCODER = Deberta(
    vocab_size=40, embed_dim=12, mlp_dim=20, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=4,
    seq_len=16, position_buckets=4, max_distance=8,
)  # fmt: skip
OVER = {
    "classifier": (Classifier(ENCODER, ("a", "b", "c"), "cls"), 3),
    "tagger": (Tagger(ENCODER, ("O", "B-X")), 2),
    "answerer": (Answerer(ENCODER, 12, 4, 5, "allowed"), 2),
    "embedder": (Embedder(ENCODER), 12),
    "detector": (Detector(ENCODER), 1),
    "mask decoder": (MaskDecoder(ENCODER), 40),
}


@pytest.mark.parametrize("name", OVER)
def test_a_model_over_an_encoder_is_a_model(name):
    """With sizes of its encoder, all of the contract's members, and as many scores as it has."""
    model, scores = OVER[name]
    members = {n for c in (Model, HfModel) for n in vars(c) if not n.startswith("_")}
    assert len(members) > 12 and not [n for n in members if not hasattr(model, n)]
    sizes = ("kind", "fills_masks", "vocab_size", "embed_dim", "num_layers", "seq_len")
    assert {n: getattr(model, n) for n in sizes} == {n: getattr(ENCODER, n) for n in sizes}
    assert encoder_of(model) is ENCODER is encoder_of(ENCODER)
    with pytest.raises(AttributeError, match="position_buckets"):
        _ = model.position_buckets  # ask the encoder
    shape = (2, 8)
    ids = jnp.asarray(np.arange(16).reshape(shape))
    batch = Batch(ids, jnp.ones(shape, jnp.int32), ids % 8, jnp.ones(shape))

    def logits(w):
        hidden, _ = model.hidden(w, batch, Compute())
        return model.logits(model.head_weights(w), hidden)

    w = jax.eval_shape(lambda key: init_weights(model.spec(), key), jax.random.key(0))
    assert jax.eval_shape(logits, w).shape == (*shape, scores)
