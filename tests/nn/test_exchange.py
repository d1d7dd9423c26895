"""Rows that go to their experts' devices and come back: all choices, in the right hands, also as
TPUs do it, with an emulation of their collective."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from lmwright.nn import exchange

N, K, D, E, WAYS = 7, 3, 5, 8, 4  # tokens of a device, choices, width, experts, devices


def ragged_all_to_all(rows, out, starts, sent, to, arriving, *, axis_name):
    """What TPUs do, from the documentation, with everything gathered: each sender's rows for us
    land where it says."""
    me = lax.axis_index(axis_name)
    every = [lax.all_gather(a, axis_name) for a in (rows, starts, sent, to)]
    for i in range(every[0].shape[0]):
        theirs, start, count, at = (a[i] for a in every)
        index = jnp.arange(out.shape[0]) - at[me]
        ours = (index >= 0) & (index < count[me])
        taken = jnp.take(theirs, start[me] + index, axis=0, mode="clip")
        out = jnp.where(ours[:, None], taken, out)
        assert arriving.shape == sent.shape
    return out


def choices(seed):
    """[WAYS N, K]: experts without repetition, some tokens without any; one device's tokens all
    choose the experts of one other."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((WAYS * N, E)), axis=1)[:, :K].astype("i4")
    ids[rng.random(WAYS * N) < 0.2] = E
    ids[N : 2 * N] = [6, 7, 0]
    return ids


@jax.custom_vjp
def spoiled(rows, ours):
    """Nobody's rows as a kernel leaves them: as memory was, forward and back."""
    return jnp.where(ours[:, None], rows, jnp.nan)


spoiled.defvjp(lambda rows, ours: (spoiled(rows, ours), ours), lambda o, g: (spoiled(g, o), None))


@pytest.mark.parametrize(
    ("ways", "ragged", "tile"),
    [(1, False, 512), (4, False, 4), (4, False, 512), (4, True, 4), (4, True, 512)],
)
def test_every_choice_meets_its_expert_and_comes_back(ways, ragged, tile, monkeypatch):
    """Each expert multiplies by a vector of its own, so that a wrong one would show; on its own
    device, in several rounds and in one."""
    monkeypatch.setattr(exchange, "TILE", tile)
    monkeypatch.setattr(exchange, "_is_ragged", lambda: ragged)
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    mesh = Mesh(np.array(jax.devices()[:ways]), ("expert",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, scales = (rng.standard_normal((n, D)).astype("f4") for n in (WAYS * N, E))
    shares = rng.standard_normal((WAYS * N, K)).astype("f4")
    pull = rng.standard_normal((WAYS * N, D)).astype("f4")
    ids = choices(1)

    def products(rows, sizes, w, shares=None):
        ends = jnp.cumsum(sizes)
        expert = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= ends, axis=1)
        y = rows * jnp.take(w["scales"], expert, axis=0, mode="fill", fill_value=0)
        return spoiled(y if shares is None else y * shares[:, None], expert < sizes.size)

    def local(x, ids, shares, scales):
        return exchange.apply_experts(products, x, ids, shares, {"scales": scales}, E, ways)

    cut = PartitionSpec("expert")
    whole = jax.shard_map(local, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut, check_vma=False)

    def loss(x, shares, scales):
        return jnp.sum(whole(x, ids, shares, scales) * pull)

    with jax.set_mesh(mesh):
        y = jax.jit(whole)(x, ids, shares, scales)
        dx, dshares, dscales = jax.jit(jax.grad(loss, (0, 1, 2)))(x, shares, scales)
    padded = np.concatenate([scales, np.zeros((1, D), "f4")])[ids]  # [WAYS N, K, D]
    weighted = shares[..., None] * padded
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(y, x * weighted.sum(1))
    close(dx, pull * weighted.sum(1))
    close(dshares, (padded * (x * pull)[:, None]).sum(-1))
    want = np.zeros((E + 1, D), "f4")
    np.add.at(want, ids, shares[..., None] * (x * pull)[:, None])
    close(dscales, want[:E])


@pytest.mark.parametrize(("tokens", "k", "ways"), [(16384, 8, 8), (512, 2, 4), (4096, 4, 2)])
def test_the_scope_of_the_rounds_says_what_is_usual(tokens, k, ways):
    """So many rounds hold 5/4 of an even share, and that share of their slots is an even one."""
    mesh = Mesh(np.array(jax.devices()[:ways]), ("expert",), axis_types=(AxisType.Auto,))
    cut = PartitionSpec("expert")

    def local(ids):
        way = exchange.Way.of(ids, 64, ways)
        slots.append(way.slots)
        return exchange._loop(way, lambda _, sum: sum + 1, jnp.zeros(1))

    slots = []
    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    with jax.set_mesh(mesh):
        text = whole.lower(jnp.zeros((ways * tokens, k), jnp.int32)).as_text(debug_info=True)
    rounds, share = map(int, exchange.SCOPE.search(text).groups())
    even = tokens * k / ways
    assert (rounds - 1) * slots[0] < 1.25 * even <= rounds * slots[0]
    assert even / (rounds * slots[0]) == pytest.approx(share / 100, abs=0.01)
    assert slots[0] * ways % 8 == 0 and even / 2 <= slots[0] <= 0.75 * even
