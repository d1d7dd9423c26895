"""Cycles of the mLSTM kernels (`kernels/tpu_mlstm.py`), as the TPU compiler schedules them.

    python benchmarks/mlstm_schedule.py [v5e ...] [--others]     # some 10 s a shape; needs libtpu

For every generation and each kernel, of chunks of L tokens in heads with memories of K x H: bundles
of the loop of the grid, one a cycle, in which a chunk is done. Behind them the fit that
`planner/compiler/mlstm_cost.py` has for `plan`, a + b L^2 / 1000 + c times the cycles that the
matrix units need, and how far it is off. Waits for memory are not in it.
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
from lmwright.planner.compiler.mlstm_cost import WAYS, least_cycles

LENGTH, HEADS = 1024, 2
SHAPES = [(64, 256, 512), (256, 256, 512), (256, 96, 192)]
OTHERS = [(128, 256, 512), (512, 256, 512), (256, 128, 128), (256, 32, 64)]


def compile_kernels(slice_name: str, size: int, key_dim: int, head_dim: int) -> None:
    """Compiles the kernels for one chip; the compiler dumps as LIBTPU_INIT_ARGS says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmwright.kernels import tpu_mlstm

    request = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**request).devices[0])

    def array(*dims: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, LENGTH, *dims), dtype, sharding=place)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(tpu_mlstm.mlstm(*arrays, size).astype(jnp.float32) ** 2)

    heads = [array(HEADS, dim) for dim in (key_dim, key_dim, head_dim)]
    gates = [array(HEADS, dtype=jnp.float32)] * 2
    ids = array(dtype=jnp.int32)
    jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*heads, *gates, ids).compile()


def cycles(slice_name: str, shape: tuple[int, int, int]) -> list[int]:
    """Cycles of a chunk, by kernel in the order of `WAYS`."""
    with tempfile.TemporaryDirectory() as folder:
        env = COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}"}
        command = [sys.executable, __file__, "--child", json.dumps([slice_name, *shape])]
        subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
        paths = [p for p in Path(folder).glob("*-final_bundles.txt") if "-analysis" not in p.name]
        of = {way: next(path for path in paths if way in path.name) for way in WAYS}
        return [by_depth(of[way])[1] for way in WAYS]


def fit(generation: str, way: str, found: list[int]) -> np.ndarray:
    """The numbers (a, b, c), none negative, of the SHAPES."""
    from scipy.optimize import nnls

    rows, measured = features(generation, way, SHAPES), np.array(found[: len(SHAPES)], float)
    return nnls(rows / measured[:, None], np.ones(len(measured)))[0]


def features(generation: str, way: str, shapes: list[tuple[int, int, int]]) -> np.ndarray:
    """What (a, b, c) are multiplied with, for each shape."""
    return np.array(
        [[1, shape[0] ** 2 / 1000, least_cycles(generation, way, *shape)] for shape in shapes]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("generations", nargs="*", default=list(SLICES))
    parser.add_argument("--others", action="store_true", help="shapes that were not fitted, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return compile_kernels(*json.loads(asked.child))
    shapes = SHAPES + (OTHERS if asked.others else [])
    for generation in asked.generations:
        found = []
        for shape in shapes:
            found.append(cycles(SLICES[generation], shape))
            named = ", ".join(f"{way} {n:,}" for way, n in zip(WAYS, found[-1], strict=True))
            print(f"{generation:<4} {' x '.join(map(str, shape)):<15} {named}", flush=True)
        for number, way in enumerate(WAYS):
            measured = [each[number] for each in found]
            numbers, rows = fit(generation, way, measured), features(generation, way, shapes)
            off = np.maximum(rows @ numbers, rows[:, 2]) / measured - 1
            said = ", ".join(f"{x:.3g}" for x in numbers)
            print(f"{generation:<4} {way}: ({said}), off by {min(off):+.0%} to {max(off):+.0%}")
    return None


if __name__ == "__main__":
    main()
