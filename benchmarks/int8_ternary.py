"""What products of integers bring a BitNet's step on TPUs, by the compiler.

    python benchmarks/int8_ternary.py v5e-16 v6e-16 [--run examples/bitnet.toml] [a.b=c ...]

Both programs train the same model; without int8 the same integers are multiplied in bfloat16,
behind a barrier, since the compiler multiplies what it knows to be int8 as such.
"""

import argparse

from undone import NO_INT8, without

from lmwright.formats.open import load_run
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.compile import CHILD, compile_for
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse

USUAL = ("train.global_batch_size=64", "train.num_microbatches=1")


def main() -> None:
    """Prints a row of a Markdown table for each slice and program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slices", nargs="+")
    parser.add_argument("--run", default="examples/bitnet.toml")
    parser.add_argument("--set", nargs="*", default=USUAL, metavar="a.b=c")
    said = parser.parse_args()
    run = load_run(said.run, said.set)
    print("| slice | products | step s | matmuls s | vector s | peak GB |")
    print("|---|---|---:|---:|---:|---:|")
    for name in said.slices:
        where = parse_slice(name)
        for products, program in (("int8", CHILD), ("bf16", without((NO_INT8,)))):
            answer = compile_for(run, where, program=program)
            cost = estimate(parse(answer.hlo), where, CHIPS[where.generation].rates)
            parts = " | ".join(f"{cost.by_kind[kind]:.3f}" for kind in ("matmul", "vector"))
            peak = f"{answer.peak_bytes / 1e9:.1f}"
            print(f"| {name} | {products} | {cost.step_s:.3f} | {parts} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
