"""Cycles of the attention kernels, as the TPU compiler schedules them.

    python benchmarks/attention_schedule.py          # some 10 s a row on two cores; needs libtpu

For every generation and head size, from the final schedule of the kernels in
`kernels/tpu_row_attention.py`: instructions (bundles, one a cycle) of the innermost loop by 1,000
scores, forward and backward, and of what is around it, the diagonal among it, by token;
`hardware/chips.py` has them for `plan`. Waits for memory are not in it. `--splash` has JAX's
splash kernel instead, the loop of whose grid is the innermost. `--disentangled` has the kernels of
`kernels/tpu_disentangled.py` beside those that see the same tokens without its terms, in whole rows
of 512 tokens.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.nn.attention import Scoring
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT

SEQ_LEN, HEADS, KV_HEADS = 1024, 4, 2
SLICES = {"v4": "v4-8", "v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4", "7x": "7x-8"}
HEAD_DIMS = (64, 96, 128, 256)
KERNELS = {"fwd": ("row_attention_fwd", "splash_mha_fwd", "disentangled_fwd"),
           "bwd": ("row_attention_bwd", "splash_mha_dkv", "disentangled_bwd")}  # fmt: skip
WHOLE_ROW = 512  # tokens of DeBERTa's rows, one block
WHOLE = ("both ways", "disentangled")
BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)")


def compile_kernels(slice_name: str, head_dim: int, which: str) -> None:
    """Compiles both kernels for one chip; the compiler dumps as LIBTPU_INIT_ARGS says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmwright.kernels import (
        tpu_attention,
        tpu_disentangled,
        tpu_row_attention,
        tpu_row_intervals,
    )
    from lmwright.nn import intervals
    from lmwright.nn.disentangled import Disentangled

    if which == "splash":
        tpu_row_attention.VECTOR_MEMORY = 0
    request = topology_request(parse_slice(slice_name))
    place = SingleDeviceSharding(topologies.get_topology_desc(**request).devices[0])

    def array(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *far: jax.Array):
        if which == "disentangled":
            scoring, strided = Disentangled(0.1, 512), not slice_name.startswith("v4")
            return tpu_disentangled.attention(q, k, v, *far, ids, scoring, strided=strided)
        if which == "both ways":
            seen, reach = intervals.both_ways(ids, None), intervals.both_ways_reach(None)
            return tpu_row_intervals.attention(q, k, v, seen, Scoring(0.1), reach)
        return tpu_attention.causal_attention(q, k, v, ids, Scoring(0.1))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, far: list, ids: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k, v, ids, *far).astype(jnp.float32) ** 2)

    length, kv_heads = (WHOLE_ROW, HEADS) if which in WHOLE else (SEQ_LEN, KV_HEADS)
    heads = (array(2, length, n, head_dim) for n in (HEADS, kv_heads, kv_heads))
    far = [array(512, HEADS, head_dim)] * 2 if which == "disentangled" else []
    ids = array(2, length, dtype=jnp.int32)
    jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*heads, far, ids).compile()


def by_depth(schedule: Path) -> list[int]:
    """Bundles outside of all loops, in the loop of the grid, in a loop within it, and so on."""
    counts: dict[int, int] = {}
    for line in schedule.read_text().splitlines():
        if found := BUNDLE.match(line):
            counts[len(found[1])] = counts.get(len(found[1]), 0) + 1
    return [counts.get(depth, 0) for depth in range(max(counts) + 1)]


def schedules(slice_name: str, head_dim: int, which: str) -> dict[str, list[int]]:
    """`by_depth` of both kernels."""
    with tempfile.TemporaryDirectory() as folder:
        env = COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}"}
        what = json.dumps([slice_name, head_dim, which])
        command = [sys.executable, __file__, "--child", what]
        subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
        return {
            way: by_depth(path)
            for path in Path(folder).glob("*-final_bundles.txt")
            for way, names in KERNELS.items()
            if "schedule-analysis" not in path.name and any(n in path.name for n in names)
        }


def compare_disentangled() -> None:
    """Prints cycles for 1,000 scores of heads of 64, all that is around them included."""
    print("chip      disentangled         without its terms      ratio")
    print("       forward   backward    forward   backward")
    for generation, slice_name in SLICES.items():
        both = [schedules(slice_name, 64, which) for which in reversed(WHOLE)]
        cycles = [[1000 * sum(found[way][1:]) / WHOLE_ROW**2 for way in KERNELS] for found in both]
        numbers = "".join(f"{x:11.2f}" for pair in cycles for x in pair)
        print(f"{generation:<5}{numbers}{sum(cycles[0]) / sum(cycles[1]):11.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--splash", action="store_true")
    parser.add_argument("--disentangled", action="store_true")
    asked = parser.parse_args()
    if asked.child:
        return compile_kernels(*json.loads(asked.child))
    if asked.disentangled:
        return compare_disentangled()
    from lmwright.kernels.tpu_row_attention import block_of

    size = SEQ_LEN if asked.splash else block_of(SEQ_LEN)
    print("                 cycles for 1,000 scores     beside them, a token")
    print("chip  head size      forward   backward      forward   backward")
    for generation, slice_name in SLICES.items():
        for head_dim in HEAD_DIMS:
            found = schedules(slice_name, head_dim, "splash" if asked.splash else "causal")
            inner = [1000 * found[way][-1] / size**2 for way in KERNELS]
            grids = [found[way][1] / SEQ_LEN if not asked.splash else 0.0 for way in KERNELS]
            loops = [sum(found[way][2:-1]) / size for way in KERNELS]
            around = [a + b for a, b in zip(grids, loops, strict=True)]
            numbers = (
                "".join(f"{x:11.2f}" for x in inner) + "  " + "".join(f"{x:11.2f}" for x in around)
            )
            print(f"{generation:<5} {head_dim:9}  {numbers}", flush=True)
    return None


if __name__ == "__main__":
    main()
