"""Moments of the inputs of matrices equal those that hooks on transformers' modules add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.gauged import moments_of
from lmwright.core.leaves import Gauged
from lmwright.core.param import walk
from lmwright.core.ragged import dot_ragged
from lmwright.core.weight import dot
from lmwright.formats.hf_layout import HfTensors, slots
from lmwright.models.counts import is_layer_matrix
from lmwright.quantize.layers import Weights, goes_by_layers
from lmwright.quantize.moments import at_once, measured, moments_shape
from tests.parity.compare import assert_near, in_files, make_batch
from tests.parity.families import ROWS
from tests.parity.test_families import TOKENS, problem

torch = pytest.importorskip("torch", reason="torch is the reference")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

QUICK = ("llama", "deepseek-v2", "qwen3-next")


def theirs_by_hooks(theirs):
    """float64 sums of x x' of each Linear's inputs over TOKENS, by the name of its weight."""
    found, hooks = {}, []

    def add(name):
        def hook(module, inputs, _):
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            found[name] = found.get(name, 0) + (x.T @ x).numpy()

        return hook

    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            hooks.append(module.register_forward_hook(add(f"{name}.weight")))
    with torch.no_grad():
        theirs(input_ids=torch.tensor(TOKENS))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ROWS]
)
def test_a_family_is_measured_as_hooks_do(name):
    """Falcon-H1's multipliers stand before its matrices there and behind them here."""
    _, theirs, model, w = problem(name)
    params = {path: param for path, param in walk(model.spec()) if is_layer_matrix(param)}
    ours = at_once(model, w, [make_batch(TOKENS)], params, Compute())
    there = in_files(model, theirs_by_hooks(theirs))
    compared = 0
    for slot in slots(model):
        if slot.path in ours:
            own = np.asarray(ours[slot.path][slot.at])
            if slot.name in there and own.shape == there[slot.name].shape:
                factor = np.trace(there[slot.name]) / np.trace(own)
                assert factor == pytest.approx(1, rel=1e-4) or model.kind == "falcon-h1"
                assert_near(own * factor, there[slot.name], slot.name)
                compared += 1
    for path, moments in ours.items():
        assert moments.shape == moments_shape(params[path])
        assert (np.diagonal(moments, axis1=-2, axis2=-1).sum(-1) > 0).any(), path
    assert compared > 3


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ROWS]
)
def test_layer_after_layer_is_as_all_at_once(name):
    _, _, model, w = problem(name)
    if not goes_by_layers(model):
        pytest.skip("its layers read more than the stream")
    params = {path: param for path, param in walk(model.spec()) if is_layer_matrix(param)}
    rows = [make_batch(tokens[None]) for tokens in TOKENS]
    wanted, found = at_once(model, w, rows, params, Compute()), set()
    weights = Weights(model, HfTensors(model, w))
    for each in measured(model, weights, rows, params, Compute()):
        one = np.asarray(wanted[each.path][each.layer])
        assert_near(np.asarray(each.moments), one, f"{each.path} {each.layer}")
        found.add((each.path, each.layer))
    assert found == {(path, i) for path, param in params.items() for i in range(param.shape[0])}


def gradient(run, moments):
    return np.asarray(jax.grad(lambda m: jnp.sum(run(m)))(moments))


def test_rows_of_experts_are_counted_by_expert():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 6)).astype("f4")
    w = rng.standard_normal((3, 6, 5)).astype("f4")
    sizes = np.asarray([17, 0, 23], np.int32)
    leaf = lambda m: Gauged(jnp.asarray(w), m, 1)  # noqa: E731
    zeros = jnp.zeros((3, 6, 6))
    out = dot_ragged("td,edf->tf", jnp.asarray(x), leaf(zeros), jnp.asarray(sizes))
    np.testing.assert_allclose(out[:17], x[:17] @ w[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[17:], x[17:] @ w[2], rtol=1e-5, atol=1e-5)
    run = lambda m: dot_ragged("td,edf->tf", jnp.asarray(x), leaf(m), jnp.asarray(sizes))  # noqa: E731
    found = gradient(run, zeros)
    wanted = [x[:17].T @ x[:17], np.zeros((6, 6)), x[17:].T @ x[17:]]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "eqn, shape, inputs, wanted",
    [
        ("btd,dnh->btnh", (2, 3, 4), 1, "btd,btz->dz"),
        ("btnh,nhd->btd", (2, 3, 4, 5), 2, None),
        ("ecd,edf->ecf", (3, 7, 4), 1, "ecd,ecz->edz"),
        ("btef,efd->btd", (2, 3, 4, 5), 1, "btef,btez->efz"),
    ],
)
def test_inputs_of_an_equation(eqn, shape, inputs, wanted):
    x = np.random.default_rng(0).standard_normal(shape).astype("f4")
    found = moments_of(eqn, inputs, jnp.asarray(x))
    if wanted is None:  # heads and their dims are one side
        x, wanted = x.reshape(*shape[:2], -1), "btd,btz->dz"
    np.testing.assert_allclose(found, np.einsum(wanted, x, x), rtol=1e-5, atol=1e-5)


def test_inputs_that_all_experts_share_count_for_each():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 3, 4), (5, 4, 6)))
    run = lambda m: dot("btd,edf->btef", x, Gauged(w, m, 1))  # noqa: E731
    found = gradient(run, jnp.zeros((5, 4, 4)))
    np.testing.assert_allclose(found, np.broadcast_to(np.einsum("btd,btz->dz", x, x), (5, 4, 4)),
                               rtol=1e-5, atol=1e-5)  # fmt: skip


def test_batches_add_up():
    _, _, model, w = problem("llama")
    params = {path: param for path, param in walk(model.spec()) if is_layer_matrix(param)}
    once = at_once(model, w, [make_batch(TOKENS)], params, Compute())
    parts = [make_batch(tokens[None]) for tokens in TOKENS]
    twice = at_once(model, w, parts, params, Compute())
    for path, moments in once.items():
        assert_near(np.asarray(twice[path]), np.asarray(moments), path)
