"""Our attention kernels for GPUs, compiled by XLA's compiler for CUDA: what their code holds."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmwright.kernels.gpu_blocks import Calls, attention_by
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, causal_reach
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.compiler.gpu import as_default_device, devices_of, has_cuda_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_cuda_compiler(), reason="needs JAX's plugin for CUDA (cuda13)"),
]
LOOPS = 3  # over blocks seen in part, whole, and in part
PRODUCTS = {"out": 2, "dq": 3, "dkv": 4}


def assembly(calls, length, machine, folder):
    """PTX by kernel, of attention and its gradients on a card."""
    mesh = Mesh(devices_of(machine), ("one",))
    place = NamedSharding(mesh, PartitionSpec())

    def some(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def passes(q, k, v, start, end, g):
        seen = Interval(start, end)
        attend = partial(attention_by, calls, seen=seen, reach=causal_reach(None))
        return jax.vjp(attend, q, k, v)[1](g)

    row, head_dim = some(1, length, dtype=jnp.int32), calls.out.head_dim
    q, k = some(1, length, 2, head_dim), some(1, length, 1, head_dim)
    with as_default_device(machine), jax.set_mesh(mesh):
        compiled = jax.jit(passes, compiler_options={"xla_dump_to": str(folder)})
        compiled.lower(q, k, k, row, row, q).compile()
    text = "\n".join(path.read_text() for path in folder.glob("*.ptx"))
    parts = re.split(r"\.entry _(\w+)_kernel", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("card", ["gpu:l4x1", "gpu:a100x1"])
@pytest.mark.parametrize("length", [256, 192])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_two_warps_multiply_the_same(head_dim, length, card, tmp_path):
    """Blocks with fewer rows than the warps together take would be multiplied several times."""
    machine = parse_machine(card)
    with jax.set_mesh(Mesh(devices_of(machine), ("one",))):
        calls = Calls.of(Scoring(1.0), length, head_dim)
    code = assembly(calls, length, machine, tmp_path)
    if not list(tmp_path.glob("*.ptx")):
        pytest.skip("this version of JAX does not show the code of kernels")
    assert set(code) == set(PRODUCTS)
    for kernel, products in PRODUCTS.items():
        call = getattr(calls, kernel)
        multiplied = LOOPS * products * call.block_q * call.block_k * call.width
        per_warp = multiplied / (16 * 8 * 16) / call.num_warps
        assert len(re.findall(r"mma\.sync\S*m16n8k16", code[kernel])) == per_warp, kernel
