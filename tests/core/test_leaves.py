"""Typed leaves: each computes what the weight it stands for would, and its gradients."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.cpu import compiler_options
from lmwright.core.fanout import dots
from lmwright.core.leaves import Lora, column_norms, dequantize, merge
from lmwright.core.param import Param
from lmwright.core.quantize import quantize, stored_spec
from lmwright.core.stack import run_stack, unstacked
from lmwright.core.weight import dot, lookup, nbytes

D, N, H, F, E, V, R = 64, 3, 32, 96, 5, 40, 4
SHAPES = {
    "btd,df->btf": Param("embed -> mlp", (D, F)),
    "btd,dnh->btnh": Param("embed -> heads head_dim", (D, N, H)),
    "btnh,nhd->btd": Param("heads head_dim -> embed", (N, H, D)),
    "btd,edf->btef": Param("[experts] embed -> mlp", (E, D, F)),
    "btef,efd->btd": Param("[experts] mlp -> embed", (E, F, D)),
    "btnd,ndf->btnf": Param("[heads] embed -> mlp", (N, D, F)),
    "btd,vd->btv": Param("vocab -> embed", (V, D)),  # a tied head: contracted over its outputs
}
SIZES = dict(b=2, t=7, d=D, n=N, h=H, f=F, e=E, v=V)
STORAGES = ("fp32", "bf16", "int8", "int4")


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@cache
def stored(param, storage, seed=0):
    """A random weight in a storage; in one program, since compiling is what takes time."""
    return jax.jit(lambda w: quantize(w, param, storage))(normal(seed, param.shape))


def lora(param, storage, seed=0, magnitude=False):
    nb, ni = len(param.batch), len(param.inputs)
    batch, inner, outer = param.shape[:nb], param.shape[nb : nb + ni], param.shape[nb + ni :]
    m = np.abs(normal(seed + 3, (*batch, *outer))) + 0.5 if magnitude else None
    return Lora(
        stored(param, storage, seed),
        normal(seed + 1, (*batch, *inner, R)),
        normal(seed + 2, (*batch, R, *outer)) / 8,
        m,
        inputs=ni,
        outputs=len(outer),
    )


def activations(eqn):
    return normal(9, [SIZES[letter] for letter in eqn.split(",")[0]])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_stored_weight_computes_as_its_array(storage):
    ws = {eqn: stored(param, storage) for eqn, param in SHAPES.items()}
    wide = jax.jit(lambda ws: {eqn: dequantize(w, jnp.float32) for eqn, w in ws.items()})(ws)
    for eqn, w in ws.items():
        spec = stored_spec(SHAPES[eqn], storage)
        assert jax.tree.map(lambda p: p.shape, spec) == jax.tree.map(lambda a: a.shape, w), eqn

    @jax.jit  # all equations in one program
    def values_and_gradients(xs, ws):
        return {
            eqn: jax.value_and_grad(lambda x, eqn=eqn: jnp.sum(jnp.sin(dot(eqn, x, ws[eqn]))))(x)
            for eqn, x in xs.items()
        }

    xs = {eqn: activations(eqn) for eqn in SHAPES}
    results, expected = (values_and_gradients(xs, w) for w in (ws, wide))
    for eqn, (value, dx) in results.items():
        np.testing.assert_allclose(value, expected[eqn][0], rtol=1e-4, atol=1e-4, err_msg=eqn)
        np.testing.assert_allclose(dx, expected[eqn][1], rtol=1e-3, atol=2e-3, err_msg=eqn)


def merged_by_hand(w):
    """The weight that a low-rank sum stands for, of whose norm no gradient is taken."""
    plain = Lora(w.base, w.a, w.b, inputs=w.inputs, outputs=w.outputs)
    if w.magnitude is None:
        return merge(plain)
    axes = tuple(range(-w.inputs - w.outputs, -w.outputs))
    norm = jnp.sqrt(jnp.sum(jax.lax.stop_gradient(merge(plain)) ** 2, axis=axes, keepdims=True))
    return merge(plain) * jnp.expand_dims(w.magnitude, axes) / norm


def test_an_output_without_weights_is_a_number_in_dora():
    """Gates of a fresh xLSTM, and rows of a vocabulary that was filled up, are zeros."""
    base, a, x = normal(0, (6, 4)), normal(1, (6, 2)), normal(2, (1, 3, 6))
    base[:, 1] = 0
    fresh = Lora(base, a, np.zeros((2, 4), "f4"), inputs=1, outputs=1)
    w = replace(fresh, magnitude=column_norms(fresh))

    def loss(factors):
        return jnp.sum(
            jnp.sin(dot("btd,df->btf", x, replace(w, b=factors[0], magnitude=factors[1])))
        )

    value, grads = jax.jit(jax.value_and_grad(loss))((w.b, w.magnitude))
    np.testing.assert_allclose(value, np.sin(x @ base).sum(), rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads) and np.abs(grads[0][:, 1]).min() > 0
    np.testing.assert_allclose(merge(w), base, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_low_rank_sum_computes_as_the_merged_weight(storage):
    # a magnitude belongs to one direction: not where a head is contracted over its outputs
    cases = [
        (eqn, activations(eqn), lora(SHAPES[eqn], storage, magnitude=magnitude))
        for eqn in SHAPES
        for magnitude in (False, True)
        if not (magnitude and eqn == "btd,vd->btv")
    ]

    def results(product):
        def loss(factors, x, eqn, w):
            y = product(eqn, x, Lora(w.base, *factors, inputs=w.inputs, outputs=w.outputs))
            return jnp.sum(jnp.sin(y)), y

        def run(arrays):
            return [
                jax.grad(loss, (0, 1), has_aux=True)((w.a, w.b, w.magnitude), x, eqn, w)
                for (eqn, *_), (x, w) in zip(cases, arrays, strict=True)
            ]

        return jax.jit(run)([case[1:] for case in cases])

    got = results(dot)
    by_merging = results(lambda eqn, x, w: jnp.einsum(eqn, x, merged_by_hand(w)))
    merged = jax.jit(lambda ws: [merge(w) for w in ws])([w for *_, w in cases])
    for (eqn, x, _), full, (gradients, y), (wanted, _) in zip(
        cases, merged, got, by_merging, strict=True
    ):
        expected = np.einsum(eqn, np.float64(x), np.float64(full))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3, err_msg=eqn)
        for g, r in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(g, r, 2e-3, atol=2e-3 * np.abs(r).max(), err_msg=eqn)


def test_an_adapters_part_of_the_inputs_gradient_is_not_turned_around():
    x, w = activations("btd,df->btf"), lora(SHAPES["btd,df->btf"], "fp32")

    def loss(factors, x):
        return jnp.sum(jnp.sin(dot("btd,df->btf", x, Lora(w.base, *factors))))

    step = jax.jit(jax.grad(loss, (0, 1)), compiler_options=compiler_options())
    text = step.lower((w.a, w.b), x).compile().as_text()
    assert f" = f32[{2 * 7},{D}]" in text
    assert f" = f32[{D},{2 * 7}]" not in text


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_adapters_that_meet_one_input_take_it_in_one_product(storage, lanes):
    eqns = ("btd,dnh->btnh", "btd,df->btf", "btd,df->btf")
    weights = [lora(SHAPES[eqn], storage, seed=10 * i) for i, eqn in enumerate(eqns)]
    weights[1] = normal(7, (D, F))  # one without an adapter
    x = activations(eqns[0])

    def loss(factors, x, products):
        q, gate = (Lora(w.base, *ab, None, inputs=w.inputs, outputs=w.outputs)
                   for w, ab in zip(weights[::2], factors, strict=True))  # fmt: skip
        return sum(jnp.sum(jnp.sin(y)) for y in products(x, (q, weights[1], gate)))

    def together(x, weights):
        return dots(x, *zip(eqns, weights, strict=True))

    def apart(x, weights):
        return [dot(eqn, x, w) for eqn, w in zip(eqns, weights, strict=True)]

    def gradients(products):
        one = jax.grad(lambda factors, x: loss(factors, x, products), (0, 1))
        return jax.jit(jax.vmap(one)) if lanes else jax.jit(one)

    factors = [(w.a, w.b) for w in weights[::2]]
    if lanes:
        stack = lambda a: jnp.stack([a, a / 2, -a])  # noqa: E731
        factors, x = jax.tree.map(stack, factors), stack(x)
    got, wanted = (gradients(products)(factors, x) for products in (together, apart))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())

    def narrow(products):
        shape = f"f32[3,{2 * 7},{2 * R}]" if lanes else f"f32[{2 * 7},{2 * R}]"
        text = gradients(products).lower(factors, x).compile().as_text()
        return sum(f"= {shape}" in line and " dot(" in line for line in text.splitlines())

    assert (narrow(together), narrow(apart)) == (1, 0)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_stack_of_layers_keeps_inputs_and_outputs_apart(storage, unroll):
    param = Param("[layers] embed -> heads head_dim", (4, D, N, H))
    back = Param("[layers] heads head_dim -> embed", (4, N, H, D))
    layers = {"q": lora(param, storage), "o": lora(back, storage, 20, magnitude=True)}

    def block(w, x):
        return jnp.tanh(dot("btnh,nhd->btd", dot("btd,dnh->btnh", x, w["q"]), w["o"])), {}

    x = normal(5, (2, 7, D)) / 8

    @jax.jit
    def one_by_one(layers, x):
        for i in range(4):
            q, o = (merge(jax.tree.map(lambda a, i=i: a[i], layers[n])) for n in "qo")
            x = jnp.tanh(jnp.einsum("btnh,nhd->btd", jnp.einsum("btd,dnh->btnh", x, q), o))
        return x

    expected = one_by_one(layers, x)
    got = jax.jit(lambda layers, x: run_stack([block], layers, x, unroll=unroll)[0])(layers, x)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert all(a.shape == (1, 4, 5) for a in unstacked(jnp.zeros((3, 4, 5), jnp.int4)))


@pytest.mark.parametrize("storage", STORAGES)
def test_lookup_reads_rows_of_any_leaf(storage):
    param = Param("vocab -> embed", (V, D))
    w, ids = lora(param, storage), jnp.array([[3, 39, 0], [17, 3, 5]])
    for leaf in (w.base, w):
        rows, whole = jax.jit(lambda w: (lookup(w, ids, jnp.float32), merge(w)))(leaf)
        expected = np.asarray(whole)[np.asarray(ids)]
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("storage, bits, error", [("int8", 8.5, 0.008), ("int4", 4.5, 0.085)])
def test_error_and_size_of_the_integers(storage, bits, error):
    param = Param("embed -> mlp", (256, 192))
    w = normal(0, param.shape)
    stored = quantize(w, param, storage)
    assert nbytes(stored) * 8 <= bits * w.size
    rms = lambda a: float(jnp.sqrt(jnp.mean(jnp.square(a))))  # noqa: E731
    assert rms(dequantize(stored, jnp.float32) - w) < error * rms(w)
    zeros = quantize(jnp.zeros(param.shape), param, storage)
    np.testing.assert_array_equal(dequantize(zeros, jnp.float32), 0)


def test_dropout_scales_what_it_keeps_and_leaves_the_base_alone():
    param = Param("embed -> mlp", (D, F))
    w = lora(param, "fp32")
    key = jax.random.key_data(jax.random.key(3))[None]  # of one microbatch
    dropped = Lora(w.base, w.a, w.b, None, key, jnp.float32(0.25), inputs=1, outputs=1)
    x = jnp.ones((64, 7, D))
    base = dot("btd,df->btf", x, w.base)
    got, full = dot("btd,df->btf", x, dropped) - base, dot("btd,df->btf", x, w) - base
    assert not np.allclose(got, full, rtol=1e-2)
    np.testing.assert_allclose(got.mean((0, 1)), full.mean((0, 1)), atol=0.05 * np.abs(full).max())
