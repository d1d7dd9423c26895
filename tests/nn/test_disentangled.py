"""Disentangled attention against the layer of transformers, and the table of distances for all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.kernels import cpu_disentangled
from lmwright.nn import disentangled
from lmwright.nn.disentangled import Disentangled, rows_in_order, rows_of

torch = pytest.importorskip("torch", reason="torch is the reference")
theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")

HEADS, HEAD_DIM, BUCKETS, FAR = 3, 4, 6, 24
LENGTH = 30
IDS = np.array([[1] * 5 + [2] * 1 + [3] * 20 + [0] * 4, [7] * 30, [0] * 30])


@pytest.mark.parametrize(("buckets", "far"), [(256, 512), (6, 24), (32, 100), (128, 4096), (9, 40)])
def test_rows_of_all_distances(buckets, far):
    distance = np.arange(-2 * far, 2 * far + 1)
    bucket = theirs.make_log_bucket_position(torch.tensor(distance), buckets, far).long()
    wanted = torch.clamp(bucket + buckets, 0, 2 * buckets - 1)
    np.testing.assert_array_equal(rows_of(distance, 2 * buckets, far), wanted)


def test_published_rows():
    distance = np.array([128, 130, 132, 200, 256, 300, 400, 510])
    bucket = rows_of(distance, 512, 512) - 256
    assert bucket.tolist() == [128, 130, 131, 169, 192, 207, 233, 255]
    assert rows_in_order(3, 512, 512).tolist() == [258, 257, 256, 255, 254]


@pytest.fixture(scope="module")
def layer():
    """The layer of transformers in float64, weights and biases far from zero."""
    config = theirs.DebertaV2Config(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, relative_attention=True,
        position_buckets=BUCKETS, max_relative_positions=FAR, share_att_key=True,
        pos_att_type=["c2p", "p2c"], attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = theirs.DisentangledSelfAttention(config).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return layer


def problem():
    draws = np.random.default_rng(1)
    x, g = draws.standard_normal((2, len(IDS), LENGTH, HEADS * HEAD_DIM))
    return x, draws.standard_normal((2 * BUCKETS, HEADS * HEAD_DIM)), g * (IDS > 0)[..., None]


def ours(w, x, relative, ids=IDS, attention=disentangled.attention):
    def project(name, x):
        y = x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]
        return y.reshape(*x.shape[:-1], HEADS, HEAD_DIM)

    q, k, v = (project(name, x) for name in ("query", "key", "value"))
    positions = project("key", relative), project("query", relative)
    scoring = Disentangled((3 * HEAD_DIM) ** -0.5, FAR)
    return attention(q, k, v, *positions, jnp.asarray(ids), scoring).reshape(x.shape)


@pytest.mark.parametrize(
    "module, cache", [(disentangled, 0), (cpu_disentangled, 0), (cpu_disentangled, 1 << 20)]
)
def test_values_and_gradients_are_those_of_transformers(module, cache, layer, monkeypatch):
    """In a packed row, a whole row, and one that is all padding, whose results are zeros; on CPUs
    with heads one by one, and together."""
    monkeypatch.setattr(cpu_disentangled, "CACHE_BYTES", cache)
    layer.zero_grad()
    x, relative, g = problem()
    their_x, their_relative = (torch.tensor(a, requires_grad=True) for a in (x, relative))
    seen = torch.tensor((IDS[:, :, None] == IDS[:, None, :]) & (IDS > 0)[:, None, :])
    places = theirs.build_relative_position(their_x, their_x, BUCKETS, FAR)
    out, _ = layer(their_x, seen[:, None], relative_pos=places, rel_embeddings=their_relative)
    out.backward(torch.tensor(g))
    with jax.enable_x64(True):
        w = {name: jnp.asarray(a.detach().numpy()) for name, a in layer.named_parameters()}
        run = partial(ours, attention=module.attention)
        y, pull_back = jax.vjp(run, w, jnp.asarray(x), jnp.asarray(relative))
        dw, dx, drelative = pull_back(jnp.asarray(g))
    np.testing.assert_allclose(y, out.detach() * (IDS > 0)[..., None], atol=3e-6)
    grads = {name: a.grad for name, a in layer.named_parameters()}
    grads |= {"x": their_x.grad, "relative": their_relative.grad}
    for name, found in (dw | {"x": dx, "relative": drelative}).items():
        wanted = grads[name].numpy()
        np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max(), err_msg=name)


def test_packed_is_alone(layer):
    """Also in a row of another length, where other distances are out of sight."""
    x, relative, _ = problem()
    w = {name: a.detach().numpy() for name, a in layer.named_parameters()}
    x, relative = (jnp.asarray(a, "float32") for a in (x, relative))
    packed, part = ours(w, x, relative), slice(6, 26)
    alone = ours(w, x[:1, part], relative, IDS[:1, part])
    np.testing.assert_allclose(packed[0, part], alone[0], atol=2e-6)


def test_one_token():
    one = jnp.ones((1, 1, 2, 3))
    positions = jnp.ones((8, 2, 3))
    out = disentangled.attention(
        one, one, one, positions, positions, jnp.ones((1, 1)), Disentangled(1.0, 9)
    )
    np.testing.assert_array_equal(out, one)
