"""Cycles of the attention kernel of long rows, as the TPU compiler schedules it.

    python benchmarks/long_attention_schedule.py [SLICE ...]   # a minute a row; needs libtpu

For every generation and head size, forward and backward: instructions (bundles, one a cycle) for
1,000 scores of a block without and with a mask, of a step of the grid beside its blocks, and of a
span beside its steps; `planner/compiler/long_attention.py` has them. Waits for memory are not in
it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lmwright.kernels.tpu_spans import sizes_of
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT

SEQ_LEN, SMALL = 8192, 60
SLICES = ("v4-8", "v5e-4", "v5p-8", "v6e-4", "7x-8")
HEAD_DIMS = (64, 96, 128, 256)
BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)")
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
REGION = re.compile(r"(?:Start|End|empty) region (\d+)")


def compile_kernels(slice_name: str, head_dim: int) -> None:
    """Compiles both kernels for one chip; the compiler dumps as LIBTPU_INIT_ARGS says."""
    import attention_schedule

    attention_schedule.SEQ_LEN = SEQ_LEN
    attention_schedule.compile_kernels(slice_name, head_dim, False)


def cycles(schedule: str, head_dim: int) -> tuple[float, float, int, int]:
    """(without a mask, with one, step, span) of a kernel's final schedule: the two largest branches
    that hold no other are the blocks', and the largest before and after them a span's."""
    lines = [line for line in schedule.splitlines() if BUNDLE.match(line)]
    where: dict[str, int] = {}
    for number, line in enumerate(lines):
        for region in REGION.findall(line):
            where.setdefault(region, number)
    every = [(n, where[t]) for n, line in enumerate(lines) for t in BRANCH.findall(line)
             if where.get(t, 0) - n > SMALL]  # fmt: skip
    inner = [a for a in every if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in every)]
    plain, masked = sorted(sorted(inner, key=lambda branch: branch[0] - branch[1])[:2])
    before = max((end - n for n, end in inner if end <= plain[0]), default=0)
    after = max((end - n for n, end in inner if n >= masked[1]), default=0)
    sizes = sizes_of(SEQ_LEN, head_dim, 2)
    blocks = [end - n for n, end in (plain, masked)]
    of_grid = sum(bool(BUNDLE.match(line)[1]) for line in lines)
    thousands = sizes.block_q * sizes.block_k / 1000
    by_score = [block / thousands for block in blocks]
    return *by_score, of_grid - sum(blocks) - before - after, before + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("slices", nargs="*", default=SLICES)
    asked = parser.parse_args()
    if asked.child:
        return compile_kernels(*json.loads(asked.child))
    print("slice    head size  way     without a mask  with one     step     span")
    for slice_name in asked.slices:
        for head_dim in HEAD_DIMS:
            with tempfile.TemporaryDirectory() as folder:
                env = COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder}"}
                what = json.dumps([slice_name, head_dim])
                command = [sys.executable, __file__, "--child", what]
                subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
                for way in ("fwd", "bwd"):
                    path = next(Path(folder).glob(f"*long_attention_{way}*[0-9]-final_bundles.txt"))
                    plain, masked, step, span = cycles(path.read_text(), head_dim)
                    print(f"{slice_name:<8} {head_dim:9}  {way}  {plain:18.2f}  {masked:8.2f}"
                          f"  {step:7}  {span:7}", flush=True)  # fmt: skip
    return None


if __name__ == "__main__":
    main()
