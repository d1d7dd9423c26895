"""The analytic model beside the TPU compiler: memory and step time of the same runs.

    python benchmarks/plan_quick.py             # some minute a row on two cores; needs libtpu
    python benchmarks/plan_quick.py --rows 1 8  # some of them

The constants of `planner/analytic/step_time.py` come from the rows marked `fitted`, those of
`planner/analytic/memory.py` from rows 1, 3, 10 and 17 to 26 and from the qwen3 and gemma presets of
`tests/aot/test_compile_families.py`, those of `planner/analytic/adapters.py` from rows 17 to 24.
The passes of `planner/analytic/experts.py` were read off the programs of rows 27 to 34, memory
of rounds is that of rows 28, 30, 32, 36 and 38. Ratios are analytic over compiler. The
compiler's step time is itself a prediction
(`planner/compiler/cost.py`), so the error of `--quick` is both together.
"""

import argparse
import tempfile
from pathlib import Path

from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.report import Report

RUN = """
name = "row"
dir = "unused"
recipe = "pretrain"
model.preset = "{preset}"
data.dir = "unused"
[train]
steps = 20000
global_batch_size = {batch}
"""

ADAPTED = "lora.rank=8"
AWAY = "train.remat=block train.offload=block_inputs"
CHUNKS = "train.mlp_chunk_tokens=4096"
TWO, FOUR = "model.num_layers=2", "model.num_layers=4"
EXPERT_8 = "mesh.expert=8 mesh.fsdp=1"


def long(tokens: int) -> str:
    """Overrides for rows of this many tokens."""
    return f"model.seq_len={tokens} data.pack.seq_len={tokens}"


# preset, slice, rows a step, overrides, whether constants come from it
ROWS = [
    ("kisoku-3b", "v4-32", 128, "train.remat=block", True),
    ("kisoku-3b", "v4-32", 128, "train.remat=mlp", True),
    ("kisoku-3b", "v4-32", 128, "train.remat=dots train.num_microbatches=2", True),
    ("kisoku-3b", "v4-32", 128, "train.remat=mlp mesh.fsdp=8 mesh.tensor=2", True),
    ("llama-1b", "v5e-8", 32,
     "train.remat=mlp train.num_microbatches=2 data.pack.seq_len=2048", True),
    ("llama-1b", "v6e-8", 32,
     "train.remat=none data.pack.seq_len=2048 optim.kind=adam8bit optim.learning_rate=1e-4", True),
    ("llama-8b", "v5p-16", 16, "train.remat=block", True),
    ("llama-70b", "v5p-128", 64, "train.remat=block mesh.fsdp=16 mesh.tensor=4", True),
    ("llama-13b", "v5p-32", 64, "train.remat=mlp train.num_microbatches=2", True),
    ("llama-3b", "v6e-16", 64,
     "train.remat=block mesh.fsdp=4 mesh.tensor=4 data.pack.seq_len=4096", True),
    ("llama-34b", "v5p-128", 64, "train.remat=block data.pack.seq_len=4096", False),
    ("llama-1b", "v5e-8", 32, "lora.rank=16 train.remat=mlp", False),
    ("llama-1b", "v5e-8", 32, "lora.rank=16 lora.base=int8 train.remat=block", False),
    ("llama-8b", "v5e-8", 16, "lora.rank=16 lora.base=int4 train.remat=block", False),
    ("llama-8b", "v5e-8", 16, "lora.rank=16 lora.base=bf16 train.remat=block", False),
    ("llama-8b", "v4-16", 32,
     "lora.rank=16 train.remat=mlp train.num_microbatches=2", False),
    ("llama-360m", "v5e:1x1", 1, f"{ADAPTED} train.remat=block {long(2**15)}", True),
    ("llama-360m", "v5e:1x1", 1, f"{ADAPTED} {AWAY} {CHUNKS} {long(2**17)}", True),
    ("llama-360m", "v5e:1x1", 1, f"{AWAY} {CHUNKS} {long(2**17)}", True),
    ("qwen3-0.6b", "v5e:1x1", 1, f"train.remat=block {long(2**15)}", True),
    ("qwen3-0.6b", "v5e:1x1", 1, f"{AWAY} {CHUNKS} {long(2**15)}", True),
    ("qwen3-0.6b", "v5e:1x1", 1, f"{ADAPTED} {AWAY} {long(2**17)}", True),
    ("gemma3-1b", "v5e:1x1", 1, f"{ADAPTED} train.remat=block {long(2**15)}", True),
    ("gemma3-1b", "v5e:1x1", 1, f"{ADAPTED} {AWAY} {CHUNKS} {long(2**17)}", True),
    ("gemma3-1b", "v5e:1x1", 1, f"{ADAPTED} {AWAY} {CHUNKS} {long(2**18)}", True),
    ("gemma3-1b", "v5e-8", 8, long(2**15), True),
    ("olmoe-1b-7b", "v5e-8", 16, f"{FOUR} train.remat=block", True),
    ("olmoe-1b-7b", "v5e-8", 16, f"{FOUR} train.remat=block {EXPERT_8}", True),
    ("olmoe-1b-7b", "v6e-8", 16, f"{FOUR} train.remat=block", True),
    ("olmoe-1b-7b", "v6e-8", 16, f"{FOUR} train.remat=block {EXPERT_8}", True),
    ("olmoe-1b-7b", "v4-32", 32, f"{FOUR} train.remat=block", True),
    ("olmoe-1b-7b", "v4-32", 32, f"{FOUR} train.remat=block mesh.expert=4 mesh.fsdp=4", True),
    ("olmoe-1b-7b", "v5e-8", 16,
     f"{FOUR} train.remat=block {EXPERT_8} model.experts.capacity_factor=1.25", True),
    ("olmoe-1b-7b", "v5e-8", 8, f"{FOUR} train.remat=none", True),
    ("olmoe-1b-7b", "v5e-8", 16, f"{FOUR} train.remat=dots", False),
    ("mixtral-8x7b", "v5p-16", 16, f"{TWO} train.remat=block {EXPERT_8}", False),
    ("mixtral-8x7b", "v5p-16", 16, f"{TWO} train.remat=mlp", False),
    ("qwen3-30b-a3b", "v6e-8", 8, f"{FOUR} train.remat=block mesh.expert=4 mesh.fsdp=2", False),
    ("olmoe-1b-7b", "v6e-8", 16, f"{FOUR} train.remat=block mesh.fsdp=4 mesh.tensor=2", False),
    ("moe-6m", "v5e-8", 64, "", False),
    ("olmoe-1b-7b", "v6e-8", 32, "train.remat=mlp", False),
    ("olmoe-1b-7b", "v6e-8", 16, "train.remat=block", False),
    ("llama-8b", "v6e-8", 16, "lora.rank=16 lora.base=bf16 train.remat=block", False),
]  # fmt: skip


def row_text(folder: Path, preset: str, on: str, batch: int, overrides: str) -> str:
    """One line of the table."""
    path = folder / "run.toml"
    path.write_text(RUN.format(preset=preset, batch=batch))
    run, where = load_run(path, overrides.split()), parse_slice(on)
    quick = Quick.of(run, machine_of(where))
    try:
        report = Report(run, where, compile_for(run, where))
    except (UserError, RuntimeError) as error:
        return f"not compiled: {str(error).splitlines()[0]}"
    peak, ours = report.compiled.peak_bytes / 2**30, quick.memory.peak / 2**30
    text = f"{ours:7.2f} {peak:8.2f} {ours / peak:5.2f}"
    if report.estimate is None:
        return f"{text}   the compiler says that it does not fit"
    found = report.estimate.step_s
    return f"{text} {quick.step_s:8.3f} {found:8.3f} {quick.step_s / found:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", help="Numbers of rows, from 1.")
    chosen = parser.parse_args().rows or range(1, len(ROWS) + 1)
    print(f"{'':<27}{'peak GiB':>16} {'ratio':>5} {'step s':>17} {'ratio':>5}")
    print(f"{'':<27}{'quick':>7} {'compiler':>8} {'':>5} {'quick':>8} {'compiler':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for number in chosen:
            *row, fitted = ROWS[number - 1]
            text = row_text(Path(folder), *row)
            name = f"{number:>2} {row[0]} {row[1]}"
            mark = "fitted" if fitted else "unseen"
            print(f"{name:<27}{text}  {mark}  {row[3]}", flush=True)


if __name__ == "__main__":
    main()
