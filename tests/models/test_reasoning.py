"""Reasoning layers: nothing at the start, then something; in every family; refused on export."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright import presets
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights, walk
from lmwright.errors import UserError
from lmwright.formats.hf_layout import slots
from lmwright.models.counts import count_active, count_by_part
from lmwright.models.llama import Llama
from lmwright.models.reasoning import Reasoning
from lmwright.objectives.clm import Clm

PLAIN = Llama(
    vocab_size=37, embed_dim=12, mlp_dim=20, num_layers=6, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=16, window=5, layer_pattern=("local", "global", "global"),
)  # fmt: skip
HOW = Reasoning(every=2, num_experts=5, mlp_dim=7)
CHOSEN = replace(HOW, experts_per_token=2, balance_loss=0.1)


def batch():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.r_[[[1] * 14], [[0] * 4 + [1] * 10]], jnp.int32)
    return Batch(
        tokens=jnp.asarray(rng.integers(0, 37, (2, 14)), jnp.int32),
        segment_ids=ids,
        positions=jnp.maximum(jnp.cumsum(ids, 1) - 1, 0).astype(jnp.int32),
        loss_weight=ids.astype(jnp.float32),
    )


@cache
def compiled(model):
    def loss(w):
        found = Clm().loss(model, w, batch(), jax.random.key(0), Compute())
        return found.total / found.weight, found.metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def loss_and_gradients(model, w):
    (value, metrics), grads = compiled(model)(w)
    return value, metrics, dict(walk(grads))


def places(model):
    """Number of a layer: (path of its stack, where it is in it)."""
    found = [place for span in model.spans for place in span.places()]
    return {n: (path, i) for path, _, numbers in found for i, n in enumerate(numbers)}


def stack_at(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("reasoning", [pytest.param(HOW, marks=pytest.mark.slow), CHOSEN])
def test_it_starts_as_nothing_and_then_learns(reasoning):
    model = replace(PLAIN, reasoning=reasoning)
    w = init_weights(model.spec(), jax.random.key(0))
    plain = init_weights(PLAIN.spec(), jax.random.key(0))
    added = {path for path, _ in walk(w) if "reasoning_" in path}
    ours, theirs = places(model), places(PLAIN)
    assert {path.rpartition(".")[0] for path in added} == {ours[i][0] for i in (1, 3, 5)}
    for number, (path, i) in theirs.items():  # the same layers, wherever they are stacked
        to, at = ours[number]
        for name, leaf in stack_at(plain, path).items():
            stack = stack_at(w, to)
            stack[name] = stack[name].at[at].set(leaf[i])
    w |= {name: plain[name] for name in ("embed", "norm")}
    value, metrics, grads = loss_and_gradients(model, w)
    want, _, _ = loss_and_gradients(PLAIN, plain)
    penalty = 0.1 * metrics["reasoning_balance"][0] if reasoning is CHOSEN else 0.0
    np.testing.assert_allclose(value, want + penalty, rtol=1e-6)
    assert all(np.any(grads[path]) == ("down" in path) for path in added if "expert_" in path)
    for path, leaf in list(walk(w)):
        if path.endswith("reasoning_expert_down"):
            moved = leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
            stack_at(w, path.rpartition(".")[0])["reasoning_expert_down"] = moved
    value, _, grads = loss_and_gradients(model, w)
    assert abs(value - want - penalty) > 1e-3 and all(np.any(grads[path]) for path in added)


def test_all_experts_are_as_many_chosen():
    """Every token to every expert, with and without a choice, is one sum."""
    model = replace(PLAIN, reasoning=HOW)
    w = jax.tree.map(lambda a: a + 0.1, init_weights(model.spec(), jax.random.key(0)))
    chosen = replace(PLAIN, reasoning=replace(HOW, experts_per_token=5))
    hidden = jax.jit(lambda m, w: m.hidden(w, batch(), Compute())[0], static_argnums=0)
    a, b = (np.asarray(hidden(m, w)) for m in (model, chosen))
    real = np.asarray(batch().segment_ids) > 0  # padding is sent to no expert
    np.testing.assert_allclose(a[real], b[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-500k", "moe-6m"])
def test_every_family_takes_it(name):
    plain = presets.of_section("model")[name]()
    model = replace(plain, reasoning=Reasoning())
    experts = 8 * 3 * model.embed_dim * 1024
    each = experts + model.embed_dim * 8 + model.embed_dim  # router, norm
    for count in (count_active, lambda m: sum(c.total for c in count_by_part(m))):
        assert count(model) == count(plain) + each
    with pytest.raises(UserError, match="no Hugging Face architecture has reasoning layers"):
        slots(model)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"every": 7}, "model.reasoning.every: 7 is more than the 6 layers"),
        ({"experts_per_token": 9}, "model.reasoning.experts_per_token: 9 of 8 experts"),
        ({"balance_loss": 0.1}, "model.reasoning.balance_loss: has no effect"),
    ],
)
def test_what_cannot_be_is_refused(fields, says):
    with pytest.raises(UserError, match=says):
        replace(PLAIN, reasoning=Reasoning(**fields)).spec()
