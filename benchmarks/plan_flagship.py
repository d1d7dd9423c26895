"""What each choice brings to kisoku-3b on a v4-32: memory and predicted step time.

    python benchmarks/plan_flagship.py          # some 40 s a row on two cores; needs libtpu

262,144 tokens a step, rows of 2,048. Every row is compiled by the TPU compiler and costed by
the same estimator. Each row has the changes of the rows above it, but for remat; those that
are no options of a run are undone by putting the old function back, in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
        "xla_tpu_enable_async_all_to_all",
    )
)
OLD = ("attention", "rope", "gradients")

# name, overrides, what is undone
VARIANTS = (
    ("remat block, compiler's defaults", ("train.remat=block", WINDOWED, *SYNCHRONOUS), OLD),
    ("weights gathered before products", ("train.remat=block", *SYNCHRONOUS), OLD),
    ("collectives asynchronous", ("train.remat=block",), OLD),
    ("attention: sequence in lanes, one backward", ("train.remat=block",), OLD[1:]),
    ("rope by a product", ("train.remat=block",), OLD[2:]),
    ("gradients scattered by all-to-all", ("train.remat=block",), ()),
    ("remat mlp", ("train.remat=mlp",), ()),
    ("remat gate, logits of 512 tokens", ("train.remat=gate", "train.loss_chunk_tokens=512"), ()),
    ("remat dots, two microbatches", ("train.remat=dots", "train.num_microbatches=2"), ()),
)


def undo(names: list[str]) -> None:
    """Puts back what podsmith did before."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    from podsmith.core import weight
    from podsmith.kernels import tpu_attention
    from podsmith.nn import rope

    if "gradients" in names:
        weight.MOST_SCATTERED = 0
    if "rope" in names:
        rope._by_product = rope._by_halves
    if "attention" in names:
        block = {f"block_{side}": 1024 for side in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
        sizes = splash.BlockSizes(**block, block_kv_compute=512, block_kv_dkv_compute=512)
        tpu_attention.block_sizes = lambda *_, **__: sizes


def one(number: int, slice_name: str) -> None:
    """Compiles one row and prints its figures as JSON."""
    from podsmith.config import dump_toml, load_run
    from podsmith.plan.child import compile_step
    from podsmith.plan.compile import _compiled
    from podsmith.plan.report import Report
    from podsmith.plan.topology import parse_slice

    _, overrides, old = VARIANTS[number]
    undo(old)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("said.toml").write_text(RUN)
        run = load_run(folder / "said.toml", overrides)
        folder.joinpath("run.toml").write_text(dump_toml(run))
        answer = compile_step(str(folder / "run.toml"), slice_name, folder)
        hlo = folder / "step.hlo"
        report = Report(
            run,
            parse_slice(slice_name),
            _compiled(answer, hlo.read_text() if hlo.exists() else ""),
        )
        found = report.estimate
        print(
            json.dumps(
                {
                    "gib": report.compiled.peak_bytes / 2**30,
                    "step_s": found and found.step_s,
                    "mfu": report.mfu,
                    "compile_s": report.compiled.compile_s,
                }
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--on", default="v4-32")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        one(args.row, args.on)
        return
    from podsmith.plan.compile import COMPILER_ENVIRONMENT

    first = None
    print(f"{'':<44} {'peak GiB':>8} {'step s':>7} {'x first':>7} {'MFU':>5} {'compile s':>9}")
    for number, (name, _, _) in enumerate(VARIANTS):
        command = [sys.executable, __file__, "--on", args.on, "--row", str(number)]
        environment = os.environ | COMPILER_ENVIRONMENT
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        row = json.loads(done.stdout.splitlines()[-1])
        if row["step_s"] is None:
            print(f"{name:<44} {row['gib']:8.1f}  does not fit", flush=True)
            continue
        first = first or row["step_s"]
        print(
            f"{name:<44} {row['gib']:8.1f} {row['step_s']:7.3f} {first / row['step_s']:7.2f} "
            f"{row['mfu']:5.0%} {row['compile_s']:9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
