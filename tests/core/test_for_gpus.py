"""What programs for GPUs alone do, on a CPU: gradients stacked in bfloat16, chunks of a loss
without a loop, an adapter and its base in one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core import frozen, sharding, stack, weight
from lmwright.core.compute import REMATS
from lmwright.core.gpu_slots import gradient_dtypes
from lmwright.core.leaves import ADAPTER_AXIS, Lora
from lmwright.core.stack import run_stack
from lmwright.core.weight import dot
from lmwright.nn import xent
from tests.kernels.test_cpu import near, normal


@pytest.fixture
def on_gpus(monkeypatch):
    """Programs made as for one GPU until `undo`."""

    def pretend():
        for module in (sharding, stack, weight, frozen, xent):
            monkeypatch.setattr(module, "platform", lambda: "gpu")

    return pretend, monkeypatch.undo


def block(w, x):
    """A product in bfloat16, weights that are read in float32, and integers."""
    h = dot("btd,df->btf", x, w["up"])
    chosen = jax.nn.softmax(dot("btd,df->btf", x.astype(jnp.float32), w["router"]))
    scaled = h * (w["scale"] + w["codes"].sum())
    x = x + dot("btf,fd->btd", jnp.tanh(scaled).astype(x.dtype), w["down"])
    return x, {"chosen": jnp.sum(chosen**2)}


def layers_of(rng, num_layers):
    sizes = {"up": (6, 9), "down": (9, 6), "router": (6, 4), "scale": (9,)}
    layers = {name: normal(rng, num_layers, *size) / 3 for name, size in sizes.items()}
    return layers | {"codes": jnp.arange(num_layers * 2, dtype=jnp.int8).reshape(num_layers, 2)}


def test_the_dtype_of_a_gradient_is_found_in_the_backward_pass():
    layer = jax.tree.map(lambda a: a[0], layers_of(np.random.default_rng(0), 1))
    x = jnp.zeros((2, 3, 6), jnp.bfloat16)
    found = dict(zip(sorted(layer), gradient_dtypes(block, layer, x), strict=True))
    wide = {"router": "float32", "scale": "float32"}
    assert found == {"up": "bfloat16", "down": "bfloat16", "codes": "int8"} | wide
    exact = gradient_dtypes(block, layer, x.astype(jnp.float32))
    assert {dtype.name for dtype in exact} == {"float32", "int8"}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("remat", ["none", "block"])
def test_gradients_stacked_before_they_are_widened(remat, num_microbatches, on_gpus):
    pretend, undo = on_gpus
    rng = np.random.default_rng(1)
    layers, x = layers_of(rng, 4), normal(rng, 2, 3, 6, dtype=jnp.bfloat16)
    codes = {"codes": layers.pop("codes")}

    def total(layers, x, unroll):
        options = {"num_microbatches": num_microbatches} if unroll else {}
        out, aux = run_stack(
            [block], layers | codes, x, remat=REMATS[remat], unroll=unroll, **options
        )
        return jnp.sum(out.astype(jnp.float32) ** 2) + aux["chosen"]

    gradients = jax.jit(jax.value_and_grad(total, (0, 1)), static_argnums=2)
    plain = gradients(layers, x, False)
    pretend()
    jax.clear_caches()
    ours, text = gradients(layers, x, True), gradients.lower(layers, x, True).as_text()
    undo()
    near(ours, plain, share=2e-2)
    joined = [line for line in text.splitlines() if "stablehlo.concatenate" in line]
    assert sum("-> tensor<4x6x9xbf16>" in line for line in joined) == 1
    assert sum("-> tensor<4x6x4xf32>" in line for line in joined) == 1


@pytest.mark.parametrize(("remat", "casts"), [("none", 1), ("dots", 2)])
def test_weights_are_cast_once_where_everything_is_kept(remat, casts, on_gpus):
    pretend, undo = on_gpus
    rng = np.random.default_rng(5)
    layers, x = layers_of(rng, 4), normal(rng, 2, 3, 6, dtype=jnp.bfloat16)
    codes = {"codes": layers.pop("codes")}

    def total(layers, x):
        out, _ = run_stack([block], layers | codes, x, remat=REMATS[remat], unroll=True)
        return jnp.sum(out.astype(jnp.float32))

    pretend()
    text = jax.jit(jax.grad(total, (0, 1))).lower(layers, x).as_text()
    undo()
    assert text.count("(tensor<6x9xf32>) -> tensor<6x9xbf16>") == 4 * (casts + 1)  # and gradients


@pytest.mark.parametrize("chunk", [4, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_without_a_loop(chunk, dtype, on_gpus):
    pretend, undo = on_gpus
    rng = np.random.default_rng(2)
    x, table = normal(rng, 2, 16, 6, dtype=jnp.dtype(dtype)), normal(rng, 11, 6)
    head = {"embed": table, "bias": -7 + normal(rng, 11) / 100}
    targets = jnp.asarray(rng.integers(0, 11, (2, 16)))
    weights = jnp.asarray(rng.random((2, 16)), jnp.float32)

    def total(w, x):
        def logits(w, x):
            return dot("btd,vd->btv", x, w["embed"], out_dtype=jnp.float32) + w["bias"]

        sums = xent.chunked_xent(logits, w, x, targets, weights, chunk=chunk, z_loss=1e-3)
        return sums.total, sums

    run = lambda: jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))  # noqa: E731
    loop = run()(head, x)
    pretend()
    apart, text = run()(head, x), run().lower(head, x).as_text()
    undo()
    near(apart, loop, share=2e-6 if dtype == "float32" else 1e-2)
    near(apart[0][0], loop[0][0], share=2e-6)  # a bias is not rounded
    near(apart[1][0]["bias"], loop[1][0]["bias"])
    assert "while" not in text


@pytest.mark.parametrize(
    ("eqn", "size", "outputs"),
    [
        ("btd,df->btf", (6, 9), 1),
        ("btd,dnh->btnh", (6, 4, 3), 2),
        ("btnh,nhd->btd", (2, 3, 8), 1),
        ("td,dnh->tnh", (6, 4, 3), 2),  # of DeBERTa's distances: apart
    ],
)
def test_an_adapter_beside_its_base_in_one_product(eqn, size, outputs, on_gpus):
    pretend, undo = on_gpus
    rng, rank, inputs = np.random.default_rng(3), 2, len(size) - outputs
    base, a, b = (normal(rng, *s) for s in (size, (*size[:inputs], rank), (rank, *size[inputs:])))
    rows = (2, 5)[2 - eqn.index(",") + inputs :]
    x = normal(rng, *rows, *size[:inputs])

    def total(x, a, b):
        w = Lora(base, a, b, inputs=inputs, outputs=outputs)
        return jnp.sum(jnp.sin(dot(eqn, x, w)))

    def merged(x, a, b):
        w = base + jnp.tensordot(a, b, 1)
        return jnp.sum(jnp.sin(jnp.einsum(eqn, x, w)))

    wanted = jax.value_and_grad(merged, (0, 1, 2))(x, a, b)
    pretend()
    got = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, a, b)
    text = jax.jit(total).lower(x, a, b).as_text()
    undo()
    near(got, wanted, share=1e-5)
    assert ("stablehlo.concatenate" in text) == (len(rows) == 2)


def test_several_adapters_do_not_copy_their_base(on_gpus):
    """Lanes of adapters beside one base, as a step computes them."""
    pretend, undo = on_gpus
    rng = np.random.default_rng(4)
    base, a, b = normal(rng, 6, 9), normal(rng, 3, 6, 2), normal(rng, 3, 2, 9)
    x = normal(rng, 3, 2, 5, 6)
    one = lambda x, a, b: dot("btd,df->btf", x, Lora(base, a, b))  # noqa: E731
    lanes = jax.jit(jax.vmap(jax.checkpoint(one), axis_name=ADAPTER_AXIS))
    pretend()
    text, got = lanes.lower(x, a, b).as_text(), lanes(x, a, b)
    undo()
    near(got, jnp.einsum("lbtd,ldf->lbtf", x, base + a @ b), share=1e-5)
    assert "stablehlo.concatenate" not in text
