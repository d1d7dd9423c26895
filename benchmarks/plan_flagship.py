"""What each choice brings to kisoku-3b on a v4-32: memory and predicted step time.

    python benchmarks/plan_flagship.py          # some 40 s a row on two cores; needs libtpu

262,144 tokens a step, rows of 2,048. Every row is compiled by the TPU compiler and costed by
the same estimator. Each row has the changes of the rows above it, but for remat; those that
are no options of a run are undone by putting the old function back, in a process of its own.
"""

import argparse
import tempfile
from pathlib import Path

from undone import ALL, without

from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.compile import CHILD, compile_for
from lmwright.planner.report import Report

RUN = """
name = "flagship"
dir = "unused"
recipe = "pretrain"
model.preset = "kisoku-3b"
data.dir = "unused"
[train]
steps = 20000
global_batch_size = 128
"""

OPTION = "train.compiler_options."
WINDOWED = OPTION + 'xla_jf_spmd_threshold_for_windowed_einsum_mib="0"'
SYNCHRONOUS = tuple(
    f'{OPTION}{name}="false"'
    for name in (
        "xla_enable_async_all_gather",
        "xla_enable_async_all_reduce",
    )
)

# name, overrides, what is undone
AFTER = ("matrices", "norms")  # the last changes
BEFORE = ("one block of keys", "swiglu", *AFTER)
DOTS = ("train.remat=dots", "train.num_microbatches=2")
GATE = ("train.remat=gate", "train.loss_chunk_tokens=512")
VARIANTS = (
    ("remat block, compiler's defaults", ("train.remat=block", WINDOWED, *SYNCHRONOUS), ALL),
    ("weights gathered before products", ("train.remat=block", *SYNCHRONOUS), ALL),
    ("collectives asynchronous", ("train.remat=block",), ALL),
    (
        "attention: sequence in lanes, one backward",
        ("train.remat=block",),
        ("rope", "gradients", *BEFORE),
    ),
    ("rope by a product", ("train.remat=block",), ("gradients", *BEFORE)),
    ("gradients scattered by all-to-all", ("train.remat=block",), BEFORE),
    ("remat mlp", ("train.remat=mlp",), BEFORE),
    ("remat gate, logits of 512 tokens", GATE, BEFORE),
    ("remat dots, two microbatches", DOTS, BEFORE),
    ("swiglu's inputs unbarred, smaller blocks", DOTS, ("whole rows", *AFTER)),
    ("attention in whole rows", DOTS, AFTER),
    ("q, k, v and gradients as matrices", DOTS, ("norms",)),
    ("norms before products", DOTS, ()),
    ("logits of 2,048 tokens", (*DOTS, "train.loss_chunk_tokens=2048"), ()),
    ("the same, remat gate, logits of 512 tokens", GATE, ()),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--on", default="v4-32")
    where = parse_slice(parser.parse_args().on)
    first = None
    print(f"{'':<44} {'peak GiB':>8} {'step s':>7} {'x first':>7} {'MFU':>5} {'compile s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(RUN)
        for name, overrides, old in VARIANTS:
            run = load_run(path, overrides)
            program = without(old) if old else CHILD
            report = Report(run, where, compile_for(run, where, program=program))
            peak, found = report.compiled.peak_bytes / 2**30, report.estimate
            if found is None:
                print(f"{name:<44} {peak:8.1f}    does not fit", flush=True)
                continue
            first = first or found.step_s
            print(
                f"{name:<44} {peak:8.1f} {found.step_s:7.3f} {first / found.step_s:7.2f} "
                f"{report.mfu:5.0%} {report.compiled.compile_s:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
