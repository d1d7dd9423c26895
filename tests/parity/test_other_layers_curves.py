"""Fifty steps of an xLSTM beside transformers' class, and of a FANformer beside its paper's
equations in torch."""

import json

import jax
import numpy as np
import pytest

from lmwright.core.param import init_weights, walk
from lmwright.formats.hf_read import model_from_config
from lmwright.models.fanformer import Fanformer
from tests.in_memory import to_hf
from tests.parity.curves import T, apart, both_curves
from tests.parity.families import ROWS as FAMILIES

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

LARGEST = 5e-6  # difference of a loss, as a share of it
FAN = Fanformer(
    vocab_size=97, embed_dim=48, mlp_dim=80, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8, seq_len=32, rope_theta=5003.0,
)  # fmt: skip


def near(curves, record_property):
    far = apart(curves)
    record_property("largest", float(far.max()))
    print(f"{curves[1][0]:.3f} to {curves[1][-1]:.3f}, apart by at most {far.max():.1e}")
    assert far.max() < LARGEST, far


@pytest.mark.slow
def test_xlstm(record_property):
    """Theirs in its mode for training, three chunks in a row. At four times the rate, weights of
    theirs that begin a rounding apart end 4e-5 apart as well."""
    said = FAMILIES["xlstm"].said | {
        "num_hidden_layers": 2, "mode": "train", "chunk_size": T // 3, "use_cache": False,
    }  # fmt: skip
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**said)).float()
    saved = json.loads(theirs.config.to_json_string(use_diff=False))
    model = model_from_config(saved | {"architectures": ["xLSTMForCausalLM"]}, "config.json")
    assert model.chunk_tokens == T // 3
    w = init_weights(model.spec(), jax.random.key(1))
    fresh = {name: torch.tensor(np.array(a)) for name, a in to_hf(model, w).items()}
    theirs.load_state_dict(fresh)
    loss = lambda ids: theirs(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    near(both_curves(model, w, theirs.parameters(), loss, rate=5e-4), record_property)


def norm(x, scale):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + FAN.norm_eps) * scale


def turned(x):
    """Rotated x [B, T, N, H]: the first half of a head with the second."""
    half = x.shape[-1] // 2
    rate = FAN.rope_theta ** (-torch.arange(half) / half)
    angle = (torch.arange(x.shape[1])[:, None] * rate)[:, None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def fan_layer(w, x):
    """A block of a llama whose attention reads the layer of arXiv 2502.21309: of an affine map, the
    first numbers are angles, which give cosines and sines, and the rest stays as it is."""
    h = norm(x, w["attention_norm"]) @ w["fan"] + w["fan_bias"]
    p, g = h[..., : FAN.num_angles], h[..., FAN.num_angles :]
    h = torch.cat([torch.cos(p), torch.sin(p), g], -1)
    q, k, v = (torch.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
    groups = FAN.num_heads // FAN.num_kv_heads
    q, k = turned(q), turned(k).repeat_interleave(groups, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * FAN.head_dim**-0.5
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    h = torch.einsum("bnts,bsnh->btnh", shares, v.repeat_interleave(groups, 2))
    x = x + torch.einsum("btnh,nhd->btd", h, w["o"])
    h = norm(x, w["mlp_norm"])
    return x + (torch.nn.functional.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


@pytest.mark.slow
def test_fanformer(record_property):
    start = init_weights(FAN.spec(), jax.random.key(1))
    w = {
        path: torch.nn.Parameter(torch.tensor(np.array(a))) if "layers" not in path
        else [torch.nn.Parameter(torch.tensor(np.array(layer))) for layer in a]
        for path, a in walk(start)
    }  # fmt: skip

    def loss(ids):
        x = w["embed"][ids]
        for i in range(FAN.num_layers):
            x = fan_layer(
                {p.removeprefix("layers."): a[i] for p, a in w.items() if "layers" in p}, x
            )
        logits = norm(x, w["norm"]) @ w["embed"].T
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    parameters = [p for a in w.values() for p in (a if isinstance(a, list) else [a])]
    near(both_curves(FAN, start, parameters, loss), record_property)
