"""Long rows in pieces: a decoder computes the same, on one device and on eight; and where they are
taken. The kernel is interpreted on CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.sharding import AXES, make_mesh
from lmwright.kernels import select, tpu_attention, tpu_pieces, tpu_row_attention, tpu_spans
from lmwright.models.llama import Llama
from lmwright.models.smollm3 import SmolLm3
from tests.sharded.problem import fresh_weights

TOKENS, PIECE = 256, 128
SIZES = {
    "vocab_size": 40, "embed_dim": 24, "mlp_dim": 40, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "seq_len": TOKENS,
}  # fmt: skip
MODEL = Llama(**SIZES)
IN_PART = SmolLm3(**SIZES, rope_pattern=("rope", "nope"))
"""One of whose layers rotates nothing, by tables without numbers."""


def mesh_of(devices, **sizes):
    shape = dict.fromkeys(AXES, 1) | {"fsdp": devices} | sizes
    return make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])


def batch_of(rows):
    """Rows of three documents and padding."""
    rng, at = np.random.default_rng(0), np.arange(TOKENS)
    ends = np.sort(rng.integers(1, TOKENS, (rows, 3)), axis=1)
    ids = 1 + (at[None, :, None] >= ends[:, None]).sum(-1)
    ids[::2] %= 4  # the last one is padding
    starts = np.concatenate([np.zeros((rows, 1), int), ends], axis=1)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, TOKENS))
    positions = at - np.take_along_axis(starts, np.where(ids == 0, 3, ids - 1), axis=1)
    whole = (jnp.asarray(a, jnp.int32) for a in (tokens, ids, positions))
    return Batch(*whole, jnp.ones((rows, TOKENS)))


def gradients(model, mesh, batch, **compute):
    """Gradients of the weights, and a sum over the hidden states of real tokens."""
    signs = jnp.cos(jnp.arange(TOKENS * model.embed_dim)).reshape(TOKENS, -1)
    real = (batch.segment_ids > 0)[..., None]

    def total(w, batch):
        return jnp.sum(model.hidden(w, batch, Compute(**compute))[0] * signs * real)

    with jax.set_mesh(mesh):
        loss, grads = jax.jit(jax.value_and_grad(total))(fresh_weights(model), batch)
    return jax.tree.map(np.asarray, grads), loss


@pytest.fixture
def counts(monkeypatch):
    """Small pieces and an interpreted kernel; whether rows are cut, at each call."""
    found, takes_pieces = [], tpu_pieces.takes_pieces

    def counted(*args, **named):
        found.append(takes_pieces(*args, **named))
        return found[-1]

    kernel = partial(tpu_attention.causal_attention, interpret=True)
    monkeypatch.setattr(tpu_attention, "causal_attention", kernel)
    monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
    monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 128, 128, 128),))
    monkeypatch.setattr(tpu_pieces, "PIECE", PIECE)
    monkeypatch.setattr(select, "LONG_ROW", PIECE)
    monkeypatch.setattr(tpu_pieces, "takes_pieces", counted)
    return found


@pytest.mark.parametrize("devices, remat", [(1, "dots"), (8, "block")])
def test_a_decoder_computes_the_same(devices, remat, counts):
    assert_same_in_pieces(MODEL, devices, remat, counts)


def test_layers_that_rotate_nothing_compute_the_same(counts):
    assert_same_in_pieces(IN_PART, 1, "dots", counts)


def assert_same_in_pieces(model, devices, remat, counts):
    batch = batch_of(devices)
    found, loss = gradients(model, mesh_of(devices), batch, kernels="tpu", remat=remat)
    assert counts == [True]
    want, other = gradients(model, mesh_of(1), batch)
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    largest = jax.tree.map(lambda a: np.abs(a).max(), want)
    for a, b, most in zip(*map(jax.tree.leaves, (found, want, largest)), strict=True):
        assert most > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * most)


@pytest.mark.parametrize(
    "rows, mesh, change, cut",
    [
        (8, {}, {}, True),
        (16, {}, {}, False),  # two rows a device
        (4, {"devices": 4, "context": 2}, {}, False),
        (4, {"devices": 4, "tensor": 2}, {}, False),
        (4, {"devices": 4, "stage": 2}, {}, False),
        (8, {}, {"mlp_chunk_tokens": 128}, False),
        (8, {}, {"block_inputs": "int8"}, False),
    ],
)  # fmt: skip
def test_where_rows_are_in_pieces(rows, mesh, change, cut, counts):
    compute = Compute(kernels="tpu", **change)
    x, table = jnp.zeros((rows, TOKENS, MODEL.embed_dim)), jnp.zeros((rows, TOKENS, 8))
    ours = select.self_attention(Compute(kernels="tpu"), False)
    with jax.set_mesh(mesh_of(**{"devices": 8} | mesh)):
        takes = partial(tpu_pieces.takes_pieces, compute=compute, attend=ours)
        assert takes(MODEL, x, (table,)) == cut
        if not cut:
            return
        assert not takes(MODEL, x, (table[:1],))  # tables that all rows share
        assert not takes(MODEL, x[:, :192], (table[:, :192],))
        assert not takes(replace(MODEL, head_dim=12), x, (table,))
        assert not takes(MODEL, x, (table,), attend=select.self_attention(compute, True))
