"""Routers against transformers', mixtures against a loop over tokens in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn.mlp import activate
from lmwright.nn.moe import Dispatch, mixture
from lmwright.nn.router import Routing, choose, load_balance, router_sums

B, T, D, F, E, K = 3, 17, 12, 20, 6, 2


def problem(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype("f4")  # noqa: E731
    w = {"up": draw(E, D, F), "gate": draw(E, D, F), "down": draw(E, F, D)}
    experts = np.argsort(rng.random((B, T, E)), axis=-1)[..., :K].astype("i4")
    real = rng.random((B, T)) > 0.2
    return draw(B, T, D), experts, rng.random((B, T, K)).astype("f4"), real, w


def by_token(x, experts, shares, real, w, kept=None):
    """Token by token: nothing sorted, nothing batched."""
    counted = np.broadcast_to(real[..., None], experts.shape) if kept is None else kept
    w = {name: jnp.asarray(a) for name, a in w.items()}

    def one(token):
        x, experts, shares, counted = token
        y = jnp.zeros_like(x)
        for j in range(K):
            e = experts[j]
            h = activate("swiglu", x @ w["gate"][e]) * (x @ w["up"][e])
            y += jnp.where(counted[j], shares[j] * (h @ w["down"][e]), 0.0)
        return y

    tokens = (a.reshape(-1, *a.shape[2:]) for a in map(jnp.asarray, (x, experts, shares, counted)))
    return jax.lax.map(one, tuple(tokens)).reshape(x.shape)


def places(experts, real, count):
    """Which choices find a place: token by token, so that none depends on later ones."""
    kept = np.zeros(experts.shape, bool)
    for b in range(B):
        free = np.full(E, count)
        for t in range(T):
            for j in range(K):
                if real[b, t] and free[experts[b, t, j]]:
                    free[experts[b, t, j]] -= 1
                    kept[b, t, j] = True
    return kept


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_mixture_and_its_gradients(factor):
    x, experts, shares, real, w = problem()
    dispatch = Dispatch(E, capacity_factor=factor)
    kept = None if factor is None else places(experts, real, -(-T * K // E))
    pull = np.random.default_rng(1).standard_normal(x.shape).astype("f4")

    def ours(x, shares, w):
        y, dropped = mixture(x, jnp.asarray(experts), shares, jnp.asarray(real), w, dispatch)
        return jnp.sum(y * pull), (y, dropped)

    def theirs(x, shares, w):
        y = by_token(x, experts, shares, real, w, kept)
        return jnp.sum(y * pull), y

    (_, (y, dropped)), grads = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(
        x, shares, w
    )
    (_, want), want_grads = jax.jit(jax.value_and_grad(theirs, (0, 1, 2), has_aux=True))(
        x, shares, w
    )
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), grads, want_grads
    )
    lost = 0 if kept is None else K * real.sum() - kept.sum()
    assert dropped.sum() == lost and (factor is None) == (lost == 0)


def test_all_tokens_at_one_expert():
    """The worst case of a router loses nothing, unless places are counted."""
    x, experts, shares, real, w = problem()
    experts[...] = [4, 1]
    for factor, lost in ((None, 0), (1.0, 2 * np.maximum(real.sum(1) - 6, 0).sum())):
        args = (x, experts, shares, real, w)
        y, dropped = jax.jit(mixture, static_argnums=5)(*args, Dispatch(E, capacity_factor=factor))
        assert dropped.sum() == lost
    kept = places(experts, real, 6)
    np.testing.assert_allclose(y, by_token(*map(jnp.asarray, args[:3]), real, w, kept), atol=1e-3)


def logits_of(seed=0):
    return np.random.default_rng(seed).standard_normal((B, T, E)).astype("f4")


@pytest.mark.parametrize("shares", ["chosen", "all"])
def test_softmax_routing_by_hand(shares):
    logits = logits_of()
    choice = choose(jnp.asarray(logits), None, Routing(K, shares=shares, scale=1.5))
    best = np.argsort(-logits, axis=-1)[..., :K]
    np.testing.assert_array_equal(choice.experts, best)
    among = np.take_along_axis(logits, best, -1) if shares == "chosen" else logits
    probs = np.exp(logits) / np.exp(among).sum(-1, keepdims=True)
    want = 1.5 * np.take_along_axis(probs, best, -1)
    np.testing.assert_allclose(choice.shares, want, rtol=1e-5)


@pytest.mark.parametrize("margin", [0.3, 2.0])
def test_routing_among_what_is_near_equals_transformers(margin):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    logits = logits_of().reshape(-1, E)
    logits[:7] = -np.abs(logits[:7])  # whose best ones are below zero, too
    theirs = torch.tensor(logits, requires_grad=True)
    weights, ids = module.sparsemixer(theirs, margin / 2, training=False)
    pull = np.random.default_rng(1).standard_normal(weights.shape).astype("f4")
    (weights * torch.tensor(pull)).sum().backward()
    routing = Routing(2, shares="near", margin=margin, scale=1.5)

    def ours(x):
        choice = choose(x[None], None, routing)
        return jnp.sum(choice.shares[0] * pull), choice

    (_, choice), grad = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(logits))
    np.testing.assert_array_equal(choice.experts[0], ids)
    np.testing.assert_allclose(choice.shares[0] / 1.5, weights.detach(), rtol=1e-5)
    np.testing.assert_allclose(grad / 1.5, theirs.grad, atol=1e-6)
    assert not (np.asarray(choice.shares) == 1.5).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_routing_in_groups_equals_transformers(normalize):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.dots1.modeling_dots1")
    config = module.Dots1Config(
        hidden_size=D, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        norm_topk_prob=normalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = module.Dots1TopkRouter(config)
    rng = np.random.default_rng(0)
    bias, weight = rng.standard_normal(12).astype("f4"), rng.standard_normal((12, D)).astype("f4")
    router.weight.data, router.e_score_correction_bias = torch.tensor(weight), torch.tensor(bias)
    x = rng.standard_normal((B, T, D)).astype("f4")
    logits, weights, ids = (a.detach().numpy() for a in router(torch.tensor(x)))
    routing = Routing(3, "sigmoid", "chosen" if normalize else "all", 2.5, 4, 2)
    ours = choose(jnp.asarray(logits.reshape(B, T, 12)), jnp.asarray(bias), routing)
    for found, want in ((ours.experts, ids), (ours.shares, weights)):
        order = np.argsort(ids, axis=-1)
        found = np.take_along_axis(np.asarray(found).reshape(-1, 3), np.argsort(
            np.asarray(ours.experts).reshape(-1, 3), axis=-1), -1)  # fmt: skip
        np.testing.assert_allclose(found, np.take_along_axis(want, order, -1), rtol=1e-5)


def test_sums_and_the_balance_loss_equal_transformers():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers, real = [logits_of(seed) for seed in range(3)], np.ones((B, T), bool)
    real[0, :5] = real[2, :9] = False
    total = {}
    for logits in layers:
        choice = choose(jnp.asarray(logits), None, Routing(K))
        sums = router_sums(choice, jnp.asarray(logits), jnp.asarray(real), jnp.ones((B, T)), None)
        total = {name: total.get(name, 0) + value for name, value in sums.items()}
    found = load_balance(total["counts"], total["probs"], total["tokens"])
    want = module.load_balancing_loss_func(
        tuple(torch.tensor(a.reshape(-1, E)) for a in layers), E, K, torch.tensor(real).long()
    )
    np.testing.assert_allclose(found, want.item(), rtol=1e-6)
    assert total["tokens"] == 3 * real.sum() == total["dropped"] and total["layers"] == 3
    probs = [torch.tensor(a[real]).softmax(-1) for a in layers]
    entropy = sum(-(p * p.log()).sum().item() for p in probs)
    np.testing.assert_allclose(total["entropy"], entropy, rtol=1e-5)
    busiest = [np.bincount(p.topk(K)[1].flatten()).max() / (K * len(p)) for p in probs]
    np.testing.assert_allclose(total["busiest"], sum(busiest), rtol=1e-5)
    z = sum(np.square(torch.tensor(a[real]).logsumexp(-1).numpy()).sum() for a in layers)
    np.testing.assert_allclose(total["z"], z, rtol=1e-5)


def test_the_bias_balances_without_a_gradient_of_the_loss():
    logits, real = jnp.asarray(logits_of()), jnp.asarray(np.arange(T) < 11) & jnp.ones((B, 1), bool)

    def sums(bias):
        choice = choose(logits, bias, Routing(K, "sigmoid"))
        found = router_sums(choice, logits, real, jnp.zeros((B, T)), bias)
        return found["balance"], (found["counts"], choice.shares)

    bias = jnp.asarray(np.linspace(-1, 1, E), jnp.float32)
    grad, (counts, _) = jax.grad(sums, has_aux=True)(bias)
    np.testing.assert_allclose(grad, counts - counts.mean(), rtol=1e-6)
    assert jax.grad(lambda b: jnp.sum(sums(b)[1][1] ** 2))(bias).any() == False  # noqa: E712
