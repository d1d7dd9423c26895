"""Signs that a ReLU keeps for the backward pass where the product behind it is frozen: gradients
are the same, and bits take the place of activations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core.param import Param
from lmwright.core.quantize import quantize
from lmwright.core.weight import dot
from lmwright.hardware.slices import parse_slice
from lmwright.kernels import relu_signs
from lmwright.kernels.relu_signs import relu_dot, signs, unpacked
from lmwright.planner.analytic.layout import Layout
from lmwright.planner.analytic.tensors import tensors
from lmwright.planner.compiler.compile import compile_for
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, init_state
from lmwright.program.step import summed_gradients
from tests.aot.slices import needs_libtpu
from tests.aot.slices import run_of as run_of_file
from tests.train.test_step import make_batch, make_run

MLP = "btf,fd->btd"
ATTENTION = LowRank(base="fp32", targets=("attention",), rank=4)
TWO = replace(ATTENTION, adapters=(Adapter(name="a"), Adapter(name="b", rank=2)))


def plain(eqn, x, w):
    return dot(eqn, jax.nn.relu(x), w)


def test_signs_come_back():
    x = np.random.default_rng(0).normal(size=(3, 24, 20)).astype(np.float32)
    x[0, 3, 4] = 0
    bits = signs(jnp.asarray(x))
    assert (bits.shape, bits.dtype) == ((3, 3, 20), jnp.uint8)
    np.testing.assert_array_equal(unpacked(bits), x > 0)
    np.testing.assert_array_equal(
        bits, np.packbits(x.reshape(3, 3, 8, 20) > 0, 2, "little")[:, :, 0]
    )


@pytest.mark.parametrize("kind", ["array", "int8"])
@pytest.mark.parametrize("tokens", [16, 13])  # 13 are kept as they are
def test_gradients_are_torchs(kind, tokens):
    torch = pytest.importorskip("torch", reason="torch is the reference")
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((2, tokens, 24), (24, 8)))
    g = rng.normal(size=(2, tokens, 8)).astype(np.float32)
    x[0, 0, :3] = 0  # where torch, too, has no slope
    leaf = (
        jnp.asarray(w)
        if kind == "array"
        else quantize(jnp.asarray(w), Param("mlp -> embed", w.shape), "int8")
    )
    wide = w if kind == "array" else np.asarray(leaf.values * leaf.scale)
    given = torch.tensor(x, requires_grad=True)
    (torch.relu(given) @ torch.tensor(wide)).backward(torch.tensor(g))
    y, pull_back = jax.vjp(lambda x: relu_dot(MLP, x, leaf), jnp.asarray(x))
    np.testing.assert_allclose(y, np.maximum(x, 0) @ wide, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(pull_back(jnp.asarray(g))[0], given.grad, rtol=2e-5, atol=2e-5)


def planned(devices=1, mesh=None, **fields):
    """The plan of a run with adapters, on a stack that is scanned as on TPUs."""
    train = {"num_microbatches": 2} | fields
    run = make_run({"mlp": "relu"}, **{k: v for k, v in train.items() if k != "lora"})
    run = replace(run, lora=fields.get("lora", ATTENTION), mesh=mesh or run.mesh)
    plan = resolve(run, jax.devices()[:devices])
    return replace(plan, compute=replace(plan.compute, unroll=False))


def gradients(plan):
    """Of adapters that are not at their start, where half of the factors have none."""
    state, batch = init_state(plan), make_batch(plan.run)
    active = plan.training.trainees
    keys = [jax.random.key(0)] * len(active)
    weights = {name: part["weights"] for name, part in state["trained"].items()}
    weights = jax.tree.map(
        lambda a: a + 0.01 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), weights
    )
    with jax.set_mesh(plan.mesh):
        fn = jax.jit(lambda *a: summed_gradients(plan, active, *a, batch, keys))
        return jax.tree.map(np.asarray, fn(state["frozen"], weights))


CASES = {
    "one device": {"remat": "none"},
    "two adapters": {"remat": "mlp", "lora": TWO},
    "eight devices": {
        "remat": "gate", "devices": 8, "mesh": Mesh(data=2, fsdp=2, tensor=2),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_signs_change_no_bit_of_a_step(case, monkeypatch):
    ours = gradients(planned(**CASES[case]))
    monkeypatch.setattr(relu_signs, "relu_dot", plain)
    theirs = gradients(planned(**CASES[case]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert all(np.abs(a).max() > 0 for a in jax.tree.leaves(ours[0]))


def kept_by_jax(plan):
    """Shapes and dtypes of what the forward pass leaves for the backward pass of all layers."""
    state = abstract_state(plan)
    run, (trainee,) = plan.run, plan.training.trainees
    rows = jax.tree.map(lambda a: a[0], make_batch(run))

    def loss(weights, frozen):
        parts = plan.training.parts(trainee, weights)
        w = plan.training.bind(frozen, parts)
        return jnp.sum(run.model.hidden(w, rows, plan.compute)[0])

    weights = state["trained"][trainee.name]["weights"]
    pull_back = jax.eval_shape(
        lambda w, frozen: jax.vjp(lambda w: loss(w, frozen), w)[1], weights, state["frozen"]
    )
    return {(a.shape, a.dtype.name) for a in jax.tree.leaves(pull_back)}


@pytest.mark.parametrize("remat", ["none", "dots", "gate", "mlp", "block"])
@pytest.mark.parametrize("adapted", ["attention", "mlp"])
def test_bits_are_kept_in_place_of_activations(adapted, remat):
    plan = planned(remat=remat, lora=replace(ATTENTION, targets=(adapted,)))
    rows, tokens, width = 4, 24, 40
    bits, whole = ((2, rows, tokens // 8, width), "uint8"), ((2, rows, tokens, width), "float32")
    kept = kept_by_jax(plan)
    assert (bits in kept) == (adapted == "attention" and remat != "block")
    if adapted == "attention":
        assert whole not in kept
    elif remat in ("none", "dots", "gate"):
        assert whole in kept
    (layout,) = Layout.of(plan)
    layout = replace(layout, kernels="reference")
    ups = [t for t in tensors([layout]) if t.name == "up"]
    said = {(2, *t.shape) for t in ups if t.fate == "saved"}
    assert said == {shape for shape in (bits[0], whole[0]) if shape in {s for s, _ in kept}}
    for t in ups:
        if t.shape == bits[0][1:]:
            assert t.chip_bytes == 2 * rows * tokens // 8 * width


SLICE = "v5e:2x2"
WIDE = (
    "model.num_layers=8", "model.embed_dim=512", "model.mlp_dim=2048", "model.seq_len=1024",
    "data.pack.seq_len=1024", "lora.rank=4", 'lora.targets=["attention"]', "train.remat=dots",
)  # fmt: skip


@pytest.mark.slow  # two programs, minutes
@needs_libtpu
def test_the_peak_falls_by_fifteen_bits_of_sixteen(tmp_path):
    """By the TPU compiler, next to a GELU, whose inputs are kept."""
    found = {}
    for kind in ("relu", "gelu_erf"):
        run = run_of_file(tmp_path, *WIDE, f"model.mlp={kind}")
        program = compile_for(run, parse_slice(SLICE))
        found[kind] = program.peak_bytes - program.code_bytes
    values = 8 * 64 // 4 * 1024 * 2048
    assert found["gelu_erf"] - found["relu"] == pytest.approx(values * 15 / 8, rel=0.02)
