"""State: plain arrays with axes of their own; decay only where an arrow is; one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from lmwright.config.run import Mesh
from lmwright.core.param import is_param, map_params, stack, walk
from lmwright.core.sharding import make_mesh, mesh_shape, weight_shardings
from lmwright.optim import KINDS
from lmwright.optim.build import build_optimizer, state_spec
from tests.in_memory import abstract_weights

kinds = pytest.mark.parametrize("kind", sorted(KINDS))


def make(kind, **said):
    return KINDS[kind](**{"learning_rate": 1e-2, **said})


def step_of(tx):
    def step(weights, state, grads):
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return step


@kinds
def test_state_has_the_structure_of_its_spec_and_keeps_it(kind, spec, weights, gradients):
    optim = make(kind)
    tx = build_optimizer(optim, spec, 10)
    state = tx.init(weights)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    declared = state_spec(optim, spec)
    assert map_params(lambda p: p.shape, declared) == jax.tree.map(lambda a: a.shape, state)
    assert all(is_param(leaf) for _, leaf in walk(declared))
    after = jax.eval_shape(step_of(tx), weights, state, gradients(0))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after[1]) == shapes
    assert state["count"].dtype == "int32"
    abstract = jax.eval_shape(tx.init, abstract_weights(spec))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == shapes


@kinds
def test_axes_of_the_state_are_axes_of_its_weight(kind, spec):
    params = dict(walk(spec))
    for path, leaf in walk(state_spec(make(kind), spec)):
        if path != "count":
            param = params[path.partition(".")[2]]
            sizes = dict(zip(param.axes, param.shape, strict=True))
            for axis, size in zip(leaf.axes, leaf.shape, strict=True):
                assert axis == "blocks" or sizes[axis] == size, (path, leaf)


@kinds
def test_only_matrices_decay(kind, spec, weights):
    """Without a gradient nothing moves but by decay."""
    still = jax.tree.map(jnp.zeros_like, weights)
    tx = build_optimizer(make(kind, weight_decay=0.5), spec, 10)
    updates, _ = jax.jit(tx.update)(still, tx.init(weights), weights)
    params, before = dict(walk(spec)), dict(walk(weights))
    for path, update in walk(updates):
        want = -1e-2 * 0.5 * before[path] if params[path].is_matrix else 0 * before[path]
        np.testing.assert_allclose(update, want, atol=1e-8, err_msg=path)


@kinds
def test_donated_and_restored_by_orbax_to_the_bit(kind, spec, weights, gradients, tmp_path):
    tx = build_optimizer(make(kind), spec, 10)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    first = jax.tree.map(jnp.copy, (weights, tx.init(weights)))
    weights, state = step(*first, gradients(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, weights))
    jax.tree.map(np.testing.assert_array_equal, back, state)
    other = step(jax.tree.map(jnp.copy, weights), back, gradients(1))
    one = step(weights, state, gradients(1))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@kinds
def test_layers_of_a_stack_are_independent(kind, layer, weights, gradients):
    """Layer 1 alone, declared unstacked, moves as it does in the stack."""

    def train(spec, pick):
        tx = build_optimizer(make(kind), spec, 10)
        step = jax.jit(step_of(tx))
        w = pick(weights["layers"])
        state = tx.init(w)
        for i in range(3):
            w, state = step(w, state, pick(gradients(i)["layers"]))
        return w

    stacked = train(stack(layer, 3), lambda tree: tree)
    alone = train(layer, lambda tree: jax.tree.map(lambda a: a[1], tree))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=2e-6), stacked, alone)


@kinds
def test_sharded_equals_whole(kind, spec, weights, gradients):
    """Weights and state over 4 x 2 devices, by the axes of their own arrows."""
    mesh = make_mesh(mesh_shape(Mesh(fsdp=4, tensor=2), 8), jax.devices())
    optim = make(kind)
    tx = build_optimizer(optim, spec, 10)
    places = weight_shardings(spec, mesh), weight_shardings(state_spec(optim, spec), mesh)
    step = jax.jit(step_of(tx))
    spread = jax.jit(step_of(tx), out_shardings=places)
    one = (weights, tx.init(weights))
    many = jax.device_put(one, places)
    for i in range(2):
        one = step(*one, gradients(i))
        many = spread(*many, jax.device_put(gradients(i), places[0]))
    # a moment that lies between two codes may be rounded to either
    atol = 2e-3 if kind == "adam8bit" else 2e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one[0], many[0])
    spread_out = [leaf for leaf in jax.tree.leaves(many[1]) if leaf.ndim > 2]
    assert spread_out and not any(leaf.sharding.is_fully_replicated for leaf in spread_out)


def test_update_without_weights_is_an_error(spec, weights, gradients):
    tx = build_optimizer(make("adamw"), spec, 10)
    with pytest.raises(ValueError, match="needs the weights"):
        tx.update(gradients(0), tx.init(weights))
