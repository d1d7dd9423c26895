"""Cycles of the attention kernel of long rows, as the TPU compiler schedules it.

    python benchmarks/long_attention_schedule.py [SLICE ...]   # a minute a row; needs libtpu

For every generation and head size, forward and backward: instructions (bundles, one a cycle) for
1,000 scores of a block without and with a mask, of a step of the grid beside its blocks, and of a
span beside its steps; `planner/compiler/long_attention.py` has them. Waits for memory are not in
it. `--near` has the blocks of rows whose queries see 64 tokens before and after them instead:
cycles for 1,000 scores.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lmwright.kernels.tpu_spans import BAND, sizes_of
from lmwright.nn.intervals import both_ways_reach
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT

SEQ_LEN, SMALL, NEAR = 8192, 60, 64
SLICES = ("v4-8", "v5e-4", "v5p-8", "v6e-4", "7x-8")
HEAD_DIMS = (64, 96, 128, 256)
BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)")
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
REGION = re.compile(r"(?:Start|End|empty) region (\d+)")


def compile_kernels(slice_name: str, head_dim: int, near: bool) -> None:
    """Compiles both kernels for one chip; the compiler dumps as LIBTPU_INIT_ARGS says."""
    import attention_schedule

    from lmwright.kernels import tpu_attention, tpu_interval_attention
    from lmwright.nn import intervals

    def attend_near(q, k, v, ids, scoring):
        seen, reach = intervals.both_ways(ids, NEAR), both_ways_reach(NEAR)
        return tpu_interval_attention.attention(q, k, v, seen, scoring, reach)

    attention_schedule.SEQ_LEN = SEQ_LEN
    if near:
        tpu_attention.causal_attention = attend_near
    attention_schedule.compile_kernels(slice_name, head_dim, False)


def near_cycles(schedule: str, head_dim: int) -> float:
    """Of 1,000 scores of a band's block, the largest branch that holds no other."""
    size = sizes_of(SEQ_LEN, head_dim, 2, both_ways_reach(NEAR)).block_k * BAND
    return 1000 * max(end - n for n, end in branches(schedule)) / size


def branches(schedule: str) -> list[tuple[int, int]]:
    """(first bundle, end) of those of a final schedule that hold no other."""
    lines = [line for line in schedule.splitlines() if BUNDLE.match(line)]
    where: dict[str, int] = {}
    for number, line in enumerate(lines):
        for region in REGION.findall(line):
            where.setdefault(region, number)
    every = [(n, where[t]) for n, line in enumerate(lines) for t in BRANCH.findall(line)
             if where.get(t, 0) - n > SMALL]  # fmt: skip
    return [a for a in every if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in every)]


def cycles(schedule: str, head_dim: int) -> tuple[float, float, int, int]:
    """(without a mask, with one, step, span) of a kernel's final schedule: the two largest branches
    that hold no other are the blocks', and the largest before and after them a span's."""
    inner = branches(schedule)
    plain, masked = sorted(sorted(inner, key=lambda branch: branch[0] - branch[1])[:2])
    before = max((end - n for n, end in inner if end <= plain[0]), default=0)
    after = max((end - n for n, end in inner if n >= masked[1]), default=0)
    sizes = sizes_of(SEQ_LEN, head_dim, 2)
    blocks = [end - n for n, end in (plain, masked)]
    bundles = filter(None, map(BUNDLE.match, schedule.splitlines()))
    of_grid = sum(bool(bundle[1]) for bundle in bundles)
    thousands = sizes.block_q * sizes.block_k / 1000
    by_score = [block / thousands for block in blocks]
    return *by_score, of_grid - sum(blocks) - before - after, before + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--near", action="store_true")
    parser.add_argument("slices", nargs="*", default=SLICES)
    asked = parser.parse_args()
    if asked.child:
        return compile_kernels(*json.loads(asked.child))
    if asked.near:
        print("slice    head size  way     near")
    else:
        print("slice    head size  way     without a mask  with one     step     span")
    for slice_name in asked.slices:
        for head_dim in HEAD_DIMS:
            with tempfile.TemporaryDirectory() as folder:
                env = COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}"}
                what = json.dumps([slice_name, head_dim, asked.near])
                command = [sys.executable, __file__, "--child", what]
                subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
                for way in ("fwd", "bwd"):
                    path = next(Path(folder).glob(f"*long_attention_{way}*[0-9]-final_bundles.txt"))
                    if asked.near:
                        near = near_cycles(path.read_text(), head_dim)
                        print(f"{slice_name:<8} {head_dim:9}  {way}  {near:8.2f}", flush=True)
                        continue
                    plain, masked, step, span = cycles(path.read_text(), head_dim)
                    print(f"{slice_name:<8} {head_dim:9}  {way}  {plain:18.2f}  {masked:8.2f}"
                          f"  {step:7}  {span:7}", flush=True)  # fmt: skip
    return None


if __name__ == "__main__":
    main()
