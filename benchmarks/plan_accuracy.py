"""How good plan's step time is: predictions against published measurements.

    python benchmarks/plan_accuracy.py            # the table; needs libtpu
    python benchmarks/plan_accuracy.py --fit      # the constants that the calibration rows give

The rows, and which of them calibrate, are in published_tpu.toml. Each is built as a podsmith
run, compiled for its slice by the TPU compiler (a minute or two, then kept in --cache) and
costed by `plan.cost`. Beside it stands the roofline: the model's FLOPs over one share of the
peak for each generation, set on the same calibration rows.
"""

import argparse
import gzip
import hashlib
import json
import tempfile
import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import podsmith
from podsmith.config import dump_toml, load_run
from podsmith.errors import UserError
from podsmith.plan.compile import Compiled, compile_for
from podsmith.plan.topology import Slice, parse_slice
from podsmith.presets.hardware import peak_of
from podsmith.run import Run

ROWS = Path(__file__).with_name("published_tpu.toml")
CACHE = Path("~/.cache/podsmith/plan_accuracy").expanduser()
TIMEOUT_S = 900.0

# source that decides what is compiled
PARTS = ("core", "kernels", "models", "nn", "objectives", "optim", "train")
FILES = ("plan/resolve.py", "plan/child.py")

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
    def depths(self) -> list[int]:
        """Layers of the models that are compiled: the real one, or two shallow ones."""
        return self.said.get("compiled_layers", [self.num_layers])

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

    def run(self, layers: int) -> Run:
        """The podsmith run of this row at a depth."""
        said = self.said
        model = {"kind": "llama", "seq_len": said["seq_len"]} | said["model"]
        sections = {
            "model": model | {"num_layers": layers},
            "train": {
                "global_batch_size": said["rows_per_chip"] * self.where.num_chips,
                "remat": said["remat"],
            },
            "mesh": {"tensor": said.get("tensor", 1)},
        }
        options = said.get("compiler_options", {})
        sections["train"] |= {f"compiler_options.{k}": v for k, v in options.items()}
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


def source_hash() -> str:
    """Of everything but the run that decides what is compiled."""
    root = Path(podsmith.__file__).parent
    digest = hashlib.sha256(f"{version('libtpu')} {version('jax')}".encode())
    paths = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    for path in [*paths, *(root / name for name in FILES)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiled(row: Row, layers: int, cache: Path) -> Compiled:
    """The compiler's answer, from the cache where it has been asked before."""
    run = row.run(layers)
    key = hashlib.sha256(f"{source_hash()} {row.where.name} {dump_toml(run)}".encode()).hexdigest()
    path = cache / f"{key[:24]}.json.gz"
    if not path.exists():
        answer = compile_for(run, row.where, timeout_s=TIMEOUT_S)
        cache.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(asdict(answer)).encode()))
    return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
