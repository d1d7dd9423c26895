"""Inference that the compiler spreads over several devices, against one device."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from lmwright.cli.main import main
from lmwright.core import ragged
from lmwright.core import spread as module
from lmwright.core.in_stack import InStack
from lmwright.core.sharding import by_shard
from lmwright.core.spread import (
    computing,
    count_devices,
    num_devices_of,
    spread_shardings,
)
from lmwright.errors import UserError
from lmwright.evals.compute import spread
from lmwright.evals.decoding import decode, prefill, row_keys
from lmwright.evals.likelihood import log_likelihoods
from lmwright.evals.prompt_rows import pad_prompts
from lmwright.nn import attention
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import activate
from lmwright.nn.moe import Dispatch, mixture
from lmwright.nn.swiglu_oai import swiglu_oai
from tests.evals.test_likelihood import COMPUTE, DECODERS, ENCODERS, asked
from tests.sharded.problem import fresh_weights

QUICK = ("gpt-oss",)
STEPS = 8
KNOBS = np.float32(1), np.int32(8), np.float32(1)


def continued(model, w, compute, num_devices):
    """Greedy tokens after two prompts."""
    tokens, valid = pad_prompts([list(range(5, 18)), [9, 2]])
    with computing(num_devices):
        logits, cache = prefill(model, compute, 32, w, tokens, valid)
        keys = row_keys(0, [0, 1], 2)
        new, last, _ = decode(
            model, compute, STEPS, "greedy", w, logits, cache, keys, np.int32(0), KNOBS
        )
    return np.asarray(new), np.asarray(last)


NAMES = [name for name in DECODERS if name not in ENCODERS]


def spread_weights(model, w):
    """Weights over four devices, not all of them whole on each."""
    there = jax.device_put(w, spread_shardings(model.spec(), jax.devices()[:4]))
    assert num_devices_of(there) == 4
    assert any(not a.sharding.is_fully_replicated for a in jax.tree.leaves(there))
    return there


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_four_devices_write_as_one(name):
    model = DECODERS[name]
    w = fresh_weights(model)
    want = continued(model, w, COMPUTE, 1)
    found = continued(model, spread_weights(model, w), spread(COMPUTE, 4), 4)
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_allclose(found[1], want[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "heads, kv_heads, num_devices, own",  # heads, keys and values of a device
    [
        (8, 4, 4, (2, 1)),
        (8, 2, 8, (1, 1)),
        (12, 3, 8, (3, 3)),
        (12, 6, 4, (3, 3)),
        (5, 5, 4, (5, 5)),
    ],
)
def test_a_kernel_computes_heads_of_its_own_on_each_device(heads, kv_heads, num_devices, own):
    """Also where there are fewer keys and values than devices, and with more arrays along heads."""
    dice, scoring = np.random.default_rng(0), Scoring(0.3)
    q, k, v = (
        dice.normal(size=(2, 16, n, 4)).astype(np.float32) for n in (heads, kv_heads, kv_heads)
    )
    ids = np.repeat([[1, 2]], 8, axis=1)[[0, 0]]
    sinks, bias = dice.normal(size=heads), dice.normal(size=(2, 16, kv_heads))
    seen = []

    def local(q, k, v, ids, sinks, bias):
        seen.append((q.shape[2], k.shape[2]))
        return attention.causal_attention(q, k + bias[..., None], v, ids, scoring, sinks)

    want = local(q, k, v, ids, sinks, bias)
    there = jax.device_put((q, k, v, ids, sinks, bias), jax.devices()[0])
    mesh = jax.make_mesh((num_devices,), ("any",), axis_types=(AxisType.Auto,))
    there = jax.device_put(there, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with computing(num_devices):
        each = jax.jit(by_shard(local, "heads", "batch seq kv_heads"))
        found = each(*there)
    assert seen[-1] == own
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["swiglu_oai", "gelu"])
@pytest.mark.parametrize("width, own", [(16, 2), (12, 3), (5, 5)])
def test_each_device_computes_a_part_of_every_expert(width, own, kind, monkeypatch):
    """Of matrices by themselves and in a stack of layers, with biases; the sums are written out."""
    dice, seen = np.random.default_rng(0), []
    draw = lambda *shape: jax.numpy.asarray(dice.normal(size=shape), "f4")  # noqa: E731
    shapes = {
        "up": (4, 6, width),
        "down": (4, width, 6),
        "up_bias": (4, width),
        "down_bias": (4, 6),
    }
    if kind == "swiglu_oai":
        shapes |= {"gate": (4, 6, width), "gate_bias": (4, width)}
    w = {name: draw(*shape) for name, shape in shapes.items()}
    x, shares, real = draw(2, 3, 6), draw(2, 3, 2), np.array([[True] * 3, [True, True, False]])
    chosen = np.array([[[0, 2], [2, 3], [3, 0]], [[2, 0], [3, 2], [0, 2]]], np.int32)
    want = np.zeros(x.shape)
    for at in zip(*real.nonzero(), strict=True):
        for share, e in zip(shares[at], chosen[at], strict=True):
            up = x[at] @ w["up"][e] + w["up_bias"][e]
            if kind == "swiglu_oai":
                h = swiglu_oai(x[at] @ w["gate"][e] + w["gate_bias"][e], up)
            else:
                h = activate(kind, up)
            want[at] += share * (h @ w["down"][e] + w["down_bias"][e])
    plain = ragged._product

    def product(x, w, *args):
        seen.append((w.stack if isinstance(w, InStack) else w).shape[-2:])
        return plain(x, w, *args)

    monkeypatch.setattr(ragged, "_product", product)
    mesh = jax.make_mesh((8,), ("any",), axis_types=(AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    there = jax.device_put((x, chosen, shares, real, w), everywhere)
    in_stack = lambda a: InStack(jax.numpy.stack([0 * a, a]), jax.device_put(1, everywhere))  # noqa: E731
    stacked = {n: a if "bias" in n else in_stack(a) for n, a in there[-1].items()}
    with computing(8):
        for leaves in (there[-1], stacked):
            found, dropped = jax.jit(partial(mixture, dispatch=Dispatch(4, kind)))(
                *there[:-1], leaves
            )
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
            assert not dropped.any()
    assert set(seen) == {(6, own), (own, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_devices_score_as_one(name):
    model, pairs = DECODERS[name], asked()[:12]
    w = fresh_weights(model)
    with computing(4):
        found = log_likelihoods(model, spread_weights(model, w), pairs, spread(COMPUTE, 4))
    want = log_likelihoods(model, w, pairs, COMPUTE)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in want], rtol=1e-4, atol=1e-3)


def test_as_many_devices_as_the_weights_need(monkeypatch):
    model = DECODERS["deepseek-v3"]
    size = 2 * sum(a.size for a in jax.tree.leaves(fresh_weights(model)))

    class Device:
        device_kind, platform = "small", "tpu"
        memory = 0

        def memory_stats(self):
            return {"bytes_limit": self.memory}

    real = module.spread_shardings
    monkeypatch.setattr(
        module, "spread_shardings", lambda spec, d: real(spec, jax.devices()[: len(d)])
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()] * 4)
    for memory, count in ((2 * size, 1), (size, 4)):
        Device.memory = memory
        assert count_devices(model, None, "m") == count
    Device.memory = size // 5
    with pytest.raises(UserError, match=r"m: the weights take .* on each of 4 devices"):
        count_devices(model, None, "m")
    assert count_devices(model, 3, "m") == 3  # as asked
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert count_devices(model, None, "m") == 1  # there is no other
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()] * 4)
    with pytest.raises(UserError, match="--devices 5: this machine has 4"):
        count_devices(model, 5, "m")
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:4])
    assert count_devices(model, None, "m") == 1  # CPUs share their memory


def test_the_commands(shared_data, capsys):
    stories = str(shared_data / "models" / "stories260k")
    words = ["generate", stories, "--prompt", "Once upon a time", "--max-new-tokens", "24"]
    told = []
    for more in ((), ("--devices", "8")):
        assert main([*words, *more]) == 0
        told.append(capsys.readouterr())
    assert told[0].out == told[1].out and "over 8 devices" in told[1].err
    assert main([*words, "--devices", "9"]) == 2
    assert "--devices 9: this machine has 8" in capsys.readouterr().err
    assert main(["eval", stories, "--devices", "2"]) == 2
    assert "computed on the devices of mesh" in capsys.readouterr().err
