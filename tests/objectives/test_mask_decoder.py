"""The enhanced mask decoder of a generator: loss and every gradient as a composition of
transformers' layers has them, whose last one takes queries of its own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.formats.hf_stream import from_hf
from lmwright.models.hf.detector import POSITIONS
from lmwright.models.mask_decoder import MaskDecoder
from lmwright.objectives.rtd import Rtd
from tests.in_memory import abstract_weights, to_hf
from tests.objectives.test_rtd import KEYS, LAYERS, OBJECTIVE, masked_lm, ours, tensor, theirs
from tests.parity.compare import assert_near
from tests.parity.test_encoders import LENGTHS, T, V, packed
from tests.planner.test_analytic import dot_flops

torch = pytest.importorskip("torch", reason="torch is the reference")
__all__ = ["ours", "theirs"]  # fixtures


def their_logits(theirs, positions, batch, tokens):
    """Logits of transformers' layers, the last one run twice with queries of their own."""
    ids = np.asarray(batch.segment_ids)
    same, parts = tensor(ids[:, :, None] == ids[:, None]), theirs.deberta
    encoder, x = parts.encoder, parts.embeddings(tensor(tokens))
    x = encoder(x, same, output_hidden_states=True).hidden_states[-2]
    z = x + positions[tensor(batch.positions).long()]
    side = {"relative_pos": encoder.get_rel_pos(x), "rel_embeddings": encoder.get_rel_embedding()}
    for _ in range(2):
        z, _ = encoder.layer[-1](x, encoder.get_attention_mask(same), query_states=z, **side)
    return theirs.lm_predictions(z, parts.embeddings.word_embeddings)


@pytest.mark.parametrize("layers", [1, 3])
def test_loss_and_gradients_are_those_of_the_composition(layers, ours, record_property):
    torch.manual_seed(layers)
    other = masked_lm(layers)
    model = MaskDecoder(replace(ours[0], num_layers=layers))
    positions = torch.nn.Parameter(torch.randn(model.seq_len, model.embed_dim))
    arrays = {k: v.numpy() for k, v in other.state_dict().items()}
    w = from_hf(model, arrays | {POSITIONS: positions.detach().numpy()})
    batch, masking = packed(LENGTHS), OBJECTIVE.masking
    hidden = jax.jit(lambda batch: masking.hide(batch, V, KEYS))(batch)

    def loss(w):
        result = masking.loss(model, w, batch, KEYS, Compute(loss_chunk_tokens=4))
        return result.total / result.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(w)
    logits = their_logits(other, positions, batch, hidden.tokens)
    masked = torch.zeros(logits.shape[:2], dtype=bool)
    for row, (places, chosen) in enumerate(zip(hidden.places, hidden.predicted, strict=True)):
        masked[row, np.asarray(places)[np.asarray(chosen) > 0]] = True
    expected = torch.nn.functional.cross_entropy(
        logits[masked], tensor(batch.tokens)[masked].long()
    )
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    wanted = dict(other.named_parameters()) | {POSITIONS: positions}
    found = to_hf(model, grads)
    assert set(found) == set(wanted)
    near = [assert_near(found[name], p.grad.numpy(), name) for name, p in wanted.items()]
    record_property("gradients", float(max(near)))


def test_work_is_what_jax_traces(ours):
    """As `test_rtd` counts; the last layer is there twice, but for its keys and values."""
    layers = 2
    objective = replace(
        OBJECTIVE, mask_ratio=0.48, generator_layers=layers, mask_decoder="enhanced"
    )
    model = replace(ours[0], position_buckets=2 * T, max_distance=2 * T)
    leaf = lambda dtype: jax.ShapeDtypeStruct((len(LENGTHS), T), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))
    loss = lambda w, b: objective.loss(model, w, b, KEYS, Compute(kernels="tpu")).total  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(loss))(abstract_weights(objective.spec(model)), batch)
    width = model.num_heads * model.head_dim
    once = 3 * 2 * 2 * (4 * T) * model.embed_dim * width * (layers + LAYERS)
    found = dot_flops(traced.jaxpr) - once
    works = objective.works(model, T).values()
    wanted = sum(work.flops_per_token() for work in works) * len(LENGTHS) * T
    assert found == pytest.approx(wanted, rel=1e-3)


def test_positions_are_new_weights_and_the_default_has_none(ours):
    model = ours[0]
    assert "positions" not in Rtd().spec(model)["generator"]
    spec = Rtd(mask_decoder="enhanced").spec(model)
    assert spec["generator"]["positions"].shape == (model.seq_len, model.embed_dim)
    assert "positions" not in spec["discriminator"]
    w = init_weights(spec, jax.random.key(0))
    assert 0.1 < np.std(w["generator"]["positions"]) / model.embed_std < 1.5
