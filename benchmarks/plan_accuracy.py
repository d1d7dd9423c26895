"""How good plan's step time is: predictions against published measurements.

    python benchmarks/plan_accuracy.py            # the table; needs libtpu
    python benchmarks/plan_accuracy.py --fit      # the constants that the calibration rows give
    python benchmarks/plan_accuracy.py --refitted # the table with them
    python benchmarks/plan_accuracy.py --quick    # the answer without a compiler, in seconds

The rows, and which of them calibrate, are in published_tpu.toml. Each is built as a lmwright
run, compiled for its slice by the TPU compiler (a minute or two, then kept as all plans are) and
costed by `plan.cost`, without what lmwright does for TPUs and the published programs did
not (undone.py). Beside it stands the roofline: the model's FLOPs over one share of the
peak for each generation, set on the same calibration rows.
"""

import argparse
import json
import math
import statistics
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from unittest import mock

from undone import ALL, without

from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import peak_of
from lmwright.hardware.slices import Slice, parse_slice
from lmwright.kernels import tpu_spans
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.compiler.cost import Estimate, estimate
from lmwright.planner.compiler.hlo import Computation, Instruction, Program, parse

ROWS = Path(__file__).with_name("published_tpu.toml")
TIMEOUT_S = 900.0

RUN = """
name = "accuracy"
dir = "unused"
recipe = "pretrain"
data.dir = "unused"
train.steps = 1000
"""


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    said: dict

    @property
    def name(self) -> str:
        return self.said["name"]

    @property
    def calibrates(self) -> bool:
        return self.said["use"] == "calibrate"

    @cached_property
    def where(self) -> Slice:
        return parse_slice(self.said["on"])

    @property
    def num_layers(self) -> int:
        return self.said["model"]["num_layers"]

    @property
    def undone(self) -> tuple[str, ...]:
        """What `undone` is to put back, so that the program is like the published one."""
        return (self.said.get("attention", ALL[0]), *ALL[1:])

    @property
    def compiled_layers(self) -> int:
        """Layers of the model that is compiled."""
        return self.said.get("compiled_layers", self.num_layers)

    def flops_per_chip(self, counts: str) -> float:
        """Of one step, by a convention of published_tpu.toml."""
        m = self.said["model"]
        heads = 2 * (m["num_heads"] + m["num_kv_heads"]) * m["head_dim"]
        mlp = (2 if m.get("mlp") == "relu" else 3) * m["mlp_dim"]
        weights = m["embed_dim"] * (self.num_layers * (heads + mlp) + m["vocab_size"])
        share = {"params": 0.0, "causal_attention": 0.5, "full_attention": 1.0}[counts]
        scores = self.num_layers * self.said["seq_len"] * m["num_heads"] * m["head_dim"]
        tokens = self.said["rows_per_chip"] * self.said["seq_len"]
        return tokens * (6.0 * weights + 12.0 * scores * share)

    @property
    def counted_s(self) -> float | None:
        """Seconds that follow from the published FLOP rate."""
        if "tflops" not in self.said:
            return None
        return self.flops_per_chip(self.said["counts"]) / (self.said["tflops"] * 1e12)

    @property
    def published_s(self) -> float:
        return self.said.get("step_s") or self.counted_s

    @property
    def least_s(self) -> float:
        """The step at the chip's peak, attention counted causally."""
        family = self.where.family
        peak = peak_of(family.device_kind).bf16_flops * family.devices_per_chip
        return self.flops_per_chip("causal_attention") / peak

    def run(self, layers: int | None = None) -> Run:
        """The lmwright run of this row, as deep as it is compiled or as said."""
        said = self.said
        model = {"kind": "llama", "seq_len": said["seq_len"]} | said["model"]
        sections = {
            "model": model | {"num_layers": layers or self.compiled_layers},
            "train": {
                "global_batch_size": said["rows_per_chip"] * self.where.num_chips,
                "remat": said["remat"],
            },
            "train.compiler_options": said.get("options", {}),
            "mesh": {"tensor": said.get("tensor", 1), "data": self.where.num_slices},
        }
        lines = [
            f"{section}.{key} = {json.dumps(value)}"
            for section, fields in sections.items()
            for key, value in fields.items()
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.toml")
            path.write_text(RUN + "\n".join(lines) + "\n")
            return load_run(path)


def read_rows() -> list[Row]:
    """All rows. Raises ValueError where a row's FLOP rate and its time disagree."""
    rows = [Row(said) for said in tomllib.loads(ROWS.read_text())["row"]]
    for row in rows:
        if "step_s" in row.said and row.counted_s is not None:
            off = row.counted_s / row.said["step_s"] - 1
            if abs(off) > 0.01:
                raise ValueError(f"{row.name}: FLOP rate and time disagree by {off:.1%}")
    return rows


@dataclass(frozen=True)
class Deeper(Program):
    """A program whose loops over `shallow` layers turn as if there were `real` ones (the
    compiler may have taken a turn out of the loop)."""

    shallow: int = 0
    real: int = 0

    def trip_count(self, loop: Instruction, holder: Computation) -> int | None:
        turns = super().trip_count(loop, holder)
        if turns in (self.shallow, self.shallow - 1):
            return turns + self.real - self.shallow
        return turns


@dataclass(frozen=True)
class Measured:
    """A row and the program that stands for it."""

    row: Row
    program: Program

    def estimate(self, share: float | None = None) -> Estimate:
        """By `plan.cost`, with another `cycles_share` than the known one if it is given."""
        where = self.row.where
        rates = CHIPS[where.generation].rates
        rates = rates if share is None else replace(rates, cycles_share=share)
        return estimate(self.program, where, rates)


def measured(rows: list[Row]) -> list[Measured]:
    """Rows with their programs; those that cannot be compiled are named and left out."""
    found = []
    for row in rows:
        try:
            answer = compile_for(
                row.run(), row.where, timeout_s=TIMEOUT_S, program=without(row.undone)
            )
        except (UserError, RuntimeError) as error:
            print(f"left out: {row.name}: {str(error).splitlines()[0]}")
            continue
        if not answer.hlo:
            print(f"left out: {row.name}: does not fit ({answer.peak_bytes / 2**30:.1f} GiB)")
            continue
        program = parse(answer.hlo)
        if row.compiled_layers != row.num_layers:
            depth = {"shallow": row.compiled_layers, "real": row.num_layers}
            program = Deeper(program.computations, program.entry, program.text, **depth)
        found.append(Measured(row, program))
    return found


def fitted_share(rows: list[Measured]) -> float:
    """The `cycles_share` at which the mean log of predicted over published is zero."""
    low, high = 0.5, 3.0
    for _ in range(12):
        middle = (low + high) / 2
        logs = [math.log(m.estimate(middle).step_s / m.row.published_s) for m in rows]
        low, high = (middle, high) if statistics.mean(logs) > 0 else (low, middle)
    return middle


def of_generation(rows: list[Measured], name: str) -> list[Measured]:
    """The rows on slices of one generation."""
    return [m for m in rows if m.row.where.generation == name]


def rooflines(rows: list[Measured]) -> dict[str, float]:
    """Share of the peak by generation, of the calibrating rows; their mean under ""."""
    by_name: dict[str, list[float]] = {}
    for m in rows:
        share = m.row.least_s / m.row.published_s
        by_name.setdefault(m.row.where.generation, []).append(share)
    means = {name: statistics.mean(shares) for name, shares in by_name.items()}
    return means | {"": statistics.mean(means.values())}


def summary(name: str, errors: Sequence[float]) -> str:
    """Median and 90th percentile (nearest rank) of the sizes of errors: within the latter lie
    nine rows of ten."""
    sizes = sorted(map(abs, errors))
    tenth = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return f"{name}: median {statistics.median(sizes):.1%}, 90th percentile {tenth:.1%}"


def print_summaries(errors: dict[str, list[tuple[float, float]]], ours: str) -> None:
    """How far off the rows are that do not calibrate, those chosen blindly on their own, too."""
    blind, rest = errors.get("blind", []), errors.get("test", [])
    print()
    for name, found in (("blind", blind), ("test", rest), ("both", [*blind, *rest])):
        if found:
            own, line = zip(*found, strict=True)
            print(summary(f"{len(found)} rows, {name}: {ours}", own))
            print(summary("  the same, roofline", line))


def print_table(rows: list[Measured], refitted: bool) -> None:
    """Predicted beside published; with the constants that the rows of a generation which calibrate
    give today, if `refitted`."""
    calibrating = [m for m in rows if m.row.calibrates]
    shares = rooflines(calibrating) if calibrating else {"": math.nan}  # of --only
    constants = {}
    if refitted:
        names = {m.row.where.generation for m in calibrating}
        constants = {name: fitted_share(of_generation(calibrating, name)) for name in names}
    errors: dict[str, list[tuple[float, float]]] = {}
    print("| run | published s | predicted s | error | roofline s | error |")
    print("|---|---:|---:|---:|---:|---:|")
    for m in rows:
        row, seconds = m.row, m.estimate(constants.get(m.row.where.generation)).step_s
        share = shares.get(row.where.generation, shares[""])
        line = row.least_s / share
        off, line_off = seconds / row.published_s - 1, line / row.published_s - 1
        mark = " (calibrates)" if row.calibrates else ""
        print(
            f"| {row.name}{mark} | {row.published_s:.3f} | {seconds:.3f} | {off:+.1%} | "
            f"{line:.3f} | {line_off:+.1%} |"
        )
        errors.setdefault(row.said["use"], []).append((off, line_off))
    print_summaries(errors, "plan")


def print_fit(rows: list[Measured]) -> None:
    """`cycles_share` of each generation that calibrates, and how far off it would be with the
    share of the others."""
    calibrating = [m for m in rows if m.row.calibrates]
    generations = sorted({m.row.where.generation for m in calibrating})
    for name in generations:
        own = of_generation(calibrating, name)
        others = [m for m in calibrating if m not in own]
        print(f"{name}: cycles_share {fitted_share(own):.3f}, of {len(own)} rows", end="")
        if others:
            share = fitted_share(others)
            off = [m.estimate(share).step_s / m.row.published_s - 1 for m in rows
                   if m.row.where.generation == name]  # fmt: skip
            print(f"; with the {share:.3f} of the others, {summary('all its rows', off)}", end="")
        print()
    print(f"one for all: {fitted_share(calibrating):.3f}")


def quick_of(row: Row) -> Quick:
    """The answer without a compiler for a row, whose program attends by JAX's splash kernel."""
    quick = Quick.of(row.run(row.num_layers), machine_of(row.where))
    if row.said.get("attention") == "no kernel":
        compute = replace(quick.plan.compute, kernels="reference")
        quick = replace(quick, plan=replace(quick.plan, compute=compute))
    with mock.patch.object(tpu_spans, "fits", lambda *_: False):
        assert quick.timing  # and kept
    return quick


def print_quick(rows: list[Row]) -> None:
    """Predicted without a compiler beside published, and the efficiency of products at which a
    row that calibrates would be met."""
    calibrating = [Measured(row, Program({}, "")) for row in rows if row.calibrates]
    shares = rooflines(calibrating) if calibrating else {"": math.nan}
    errors: dict[str, list[tuple[float, float]]] = {}
    print("| run | published s | quick s | error | |")
    print("|---|---:|---:|---:|---|")
    for row in rows:
        quick = quick_of(row)
        line = row.least_s / shares.get(row.where.generation, shares[""])
        off = quick.step_s / row.published_s - 1
        note = "" if quick.fits else "does not fit"
        if row.calibrates:
            products = quick.timing.by_kind["matmul"]
            left = row.published_s - quick.step_s + products
            note = f"calibrates: {products / left * quick.machine.matmul_efficiency:.3f}"
        print(f"| {row.name} | {row.published_s:.3f} | {quick.step_s:.3f} | {off:+.1%} | {note} |")
        errors.setdefault(row.said["use"], []).append((off, line / row.published_s - 1))
    print_summaries(errors, "quick")


def print_kinds(rows: list[Measured]) -> None:
    """Where the seconds go, row by row."""
    for m in rows:
        kinds = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in m.estimate().by_kind.items())
        print(f"{m.row.name}: {kinds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print constants, not the table")
    parser.add_argument("--refitted", action="store_true", help="the table with those constants")
    parser.add_argument("--quick", action="store_true", help="the answer without a compiler")
    parser.add_argument("--kinds", action="store_true", help="print where the seconds go")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    said = parser.parse_args()
    chosen = [row for row in read_rows() if said.only in row.name]
    if said.quick:
        return print_quick(chosen)
    rows = measured(chosen)
    if said.fit:
        print_fit(rows)
    elif said.kinds:
        print_kinds(rows)
    else:
        print_table(rows, said.refitted)
    return None


if __name__ == "__main__":
    main()
