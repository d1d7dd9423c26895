"""Cycles of the kernels of memories (`kernels/tpu_mlstm.py`, `kernels/tpu_delta_rule.py`,
`kernels/tpu_ssd.py`), as the TPU compiler schedules them.

    python benchmarks/recurrence_schedule.py [v5e ...] [--only delta_rule] [--others]

For every generation, each recurrence and each of its kernels, of chunks of L tokens in heads with
memories of K x H: bundles of the loop of the grid, one a cycle, in which a chunk of each head is
done, by head. Behind them the fit that `planner/compiler/recurrence_cost.py` has for `plan`,
a + b L^2 / 1000 + c times the cycles that the matrix units need, and how far it is off. Waits for
memory are not in it. Some 10 s a shape; needs libtpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from attention_schedule import SLICES, by_depth

from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT
from lmwright.planner.compiler.recurrence_cost import WAYS, least_cycles

Shape = tuple[int, int, int]
LENGTH, HEADS = 1024, {"mlstm": 2, "delta_rule": 4, "ssd": 8}
SHAPES = {
    "mlstm": [(64, 256, 512), (256, 256, 512), (256, 96, 192)],
    "delta_rule": [(64, 128, 128), (128, 128, 128), (128, 256, 256)],
    "ssd": [(64, 128, 64), (128, 128, 64), (256, 128, 64), (128, 128, 128)],
}
OTHERS = {
    "mlstm": [(128, 256, 512), (512, 256, 512), (256, 128, 128), (256, 32, 64)],
    "delta_rule": [(64, 64, 64), (128, 64, 64)],
    "ssd": [(128, 128, 32), (128, 256, 64), (256, 64, 64)],
}


def compile_kernels(recurrence: str, slice_name: str, size: int, key_dim: int, head_dim: int):
    """Compiles the kernels for one chip; the compiler dumps as LIBTPU_INIT_ARGS says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmwright.kernels.select import KERNELS
    from lmwright.kernels.ssd_by import KERNELS as OF_STATE_SPACES

    request = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**request).devices[0])
    name, count = f"tpu {recurrence.replace('_', ' ')}", HEADS[recurrence]
    kernel = (KERNELS if name in KERNELS else OF_STATE_SPACES)[name]

    def array(*dims: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, LENGTH, *dims), dtype, sharding=place)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(kernel(*arrays, size).astype(jnp.float32) ** 2)

    keys = 1 if recurrence == "ssd" else count  # heads of a step share them
    heads = [array(n, dim) for n, dim in ((keys, key_dim), (keys, key_dim), (count, head_dim))]
    gates = [array(count, dtype=jnp.float32)] * 2
    ids = array(dtype=jnp.int32)
    jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*heads, *gates, ids).compile()


def cycles(recurrence: str, slice_name: str, shape: Shape) -> list[float]:
    """Cycles of a chunk of a head, by kernel in the order of `WAYS`."""
    with tempfile.TemporaryDirectory() as folder:
        env = COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}"}
        child = json.dumps([recurrence, slice_name, *shape])
        command = [sys.executable, __file__, "--child", child]
        subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
        paths = [p for p in Path(folder).glob("*-final_bundles.txt") if "-analysis" not in p.name]
        of = {way: next(p for p in paths if way in p.name) for way in WAYS[recurrence]}
        together = 1 if recurrence == "mlstm" else HEADS[recurrence]  # heads of a step
        return [by_depth(of[way])[1] / together for way in WAYS[recurrence]]


def fit(generation: str, way: str, shapes: list[Shape], found: list[float]) -> np.ndarray:
    """The numbers (a, b, c), none negative, of these shapes."""
    from scipy.optimize import nnls

    rows, measured = features(generation, way, shapes), np.array(found)
    return nnls(rows / measured[:, None], np.ones(len(measured)))[0]


def features(generation: str, way: str, shapes: list[Shape]) -> np.ndarray:
    """What (a, b, c) are multiplied with, for each shape."""
    return np.array(
        [[1, shape[0] ** 2 / 1000, least_cycles(generation, way, *shape)] for shape in shapes]
    )


def report(generation: str, recurrence: str, others: bool) -> None:
    """Prints cycles and fits."""
    fitted = SHAPES[recurrence]
    shapes, found = fitted + (OTHERS[recurrence] if others else []), []
    for shape in shapes:
        found.append(cycles(recurrence, SLICES[generation], shape))
        named = ", ".join(f"{w} {n:,.0f}" for w, n in zip(WAYS[recurrence], found[-1], strict=True))
        print(f"{generation:<4} {' x '.join(map(str, shape)):<15} {named}", flush=True)
    for number, way in enumerate(WAYS[recurrence]):
        measured = np.array([each[number] for each in found])
        numbers = fit(generation, way, fitted, measured[: len(fitted)])
        rows = features(generation, way, shapes)
        off = np.maximum(rows @ numbers, rows[:, 2]) / measured - 1
        said = ", ".join(f"{x:.3g}" for x in numbers)
        print(f"{generation:<4} {way}: ({said}), off by {min(off):+.0%} to {max(off):+.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("generations", nargs="*", default=list(SLICES))
    parser.add_argument("--only", choices=list(WAYS), help="one recurrence alone")
    parser.add_argument("--others", action="store_true", help="shapes that were not fitted, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return compile_kernels(*json.loads(asked.child))
    for generation in asked.generations:
        for recurrence in [asked.only] if asked.only else WAYS:
            report(generation, recurrence, asked.others)
    return None


if __name__ == "__main__":
    main()
