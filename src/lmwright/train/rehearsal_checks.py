"""Evidence of a rehearsal: what the devices did, and what became of the files that were saved."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import psutil

from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.core.param import count_params
from lmwright.errors import UserError, first_line
from lmwright.evals.prompted import generate_command
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.open import load_run
from lmwright.formats.proof import Proof, sentence
from lmwright.formats.reference import too_large
from lmwright.hardware.chips import GIB
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.remat import settled
from lmwright.planner.checklist import (
    ADAPTERS,
    EXPORT,
    FALLS,
    FITS,
    SPEED,
    WRITES,
    Check,
    fits_check,
)
from lmwright.planner.measured import machine_of_run, measured
from lmwright.planner.units import short_duration
from lmwright.program.trainee import spec_of, training_of
from lmwright.report.read import RunRecord
from lmwright.train.chips import SLICE
from lmwright.train.start import starting_note

SAME_SHARE = 1e-3  # of a loss, that ten steps of a warm-up may change it by
MARGINS = {"dpo": ("reward_margin",), "kto": ("reward_chosen", "reward_rejected")}
PROMPT = "The"
NEW_TOKENS = 16
CHILD = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "LMWRIGHT_HEARTBEAT")


def device_checks(run: Run, devices: Sequence[jax.Device], record: RunRecord) -> list[Check]:
    """Checks of the first session of a rehearsal."""
    return [_loads(run, record), _fits(devices, record), _falls(run, record), _speed(run, record)]


def _loads(run: Run, record: RunRecord) -> Check:
    compiles = [event["seconds"] for event in record.events if event["kind"] == "compile"]
    origin = run.train.init_from
    weights = starting_note(record.dir) or (f"weights of {origin}" if origin else "fresh weights")
    return Check(
        "loads",
        True,
        f"data and {record.plan.get('num_params', 0):,} parameters ({weights}); "
        f"compiled in {compiles[0]:.1f} s",
    )


def _fits(devices: Sequence[jax.Device], record: RunRecord) -> Check:
    peak_bytes = max(record.train["peak_memory_bytes"].values)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return fits_check(peak_bytes, limit, peak_bytes <= limit)
    free_bytes = psutil.virtual_memory().available
    used = f"the process holds {peak_bytes / GIB:.2f} GiB of the host's memory"
    return Check(FITS, True, f"{used}, {free_bytes / GIB:.2f} GiB are free beside it")


def _falls(run: Run, record: RunRecord) -> Check:
    """Check that the loss falls: the held-out loss of the same rows before and after, else that of
    training. What is held out of preferences has the loss of the chosen answers alone, which DPO
    and KTO may raise, so that its rewards count there."""
    rate = _rate(record)
    if (names := MARGINS.get(run.objective.kind)) and record.evals:
        if not all(name in curves for curves in record.evals.values() for name in names):
            return Check(FALLS, None, "no reward of both kinds of answers is held out")
        sides = []
        for at in (0, -1):
            rewards = [[c[name].values[at] for name in names] for c in record.evals.values()]
            sides.append(sum(first - sum(rest) for first, *rest in rewards) / len(rewards))
        text = f"held-out reward margin {sides[0]:.4f}, then {sides[1]:.4f}{rate}"
        return Check(FALLS, sides[1] > sides[0], text)
    pairs = [(c["loss"].values[0], c["loss"].values[-1]) for c in record.evals.values()]
    what = "held-out loss"
    if not pairs:
        losses = record.train["loss"].values
        some = max(1, len(losses) // 3)
        pairs = [(sum(losses[:some]) / some, sum(losses[-some:]) / some)]
        what = f"nothing is held out; training loss of the first and last {some} steps:"
    before, after = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    text = f"{what} {before:.4f}, then {after:.4f}{rate}"
    if after < before:
        return Check(FALLS, True, text)
    return Check(FALLS, False if after > before * (1 + SAME_SHARE) else None, text)


def _rate(record: RunRecord) -> str:
    rates = record.train.get("learning_rate")
    return f", at a learning rate of {rates.values[-1]:.2g}" if rates else ""


def _speed(run: Run, record: RunRecord) -> Check:
    try:
        took = measured(record)
        name = os.environ.get(SLICE) or run.plan.on or machine_of_run(record)
        machine = parse_machine(name)
        quick = Quick.of(settled(run, machine).run, machine)
    except UserError as error:
        return Check(SPEED, None, str(error))
    ratio = took.step_s / quick.step_s
    text = (
        f"{short_duration(took.step_s)} a step; {short_duration(quick.step_s)} predicted for "
        f"{name}, give or take {quick.error_share:.0%}; {ratio:.2f} times that"
    )
    if ratio <= 1 + quick.error_share:
        return Check(SPEED, True, text)
    # what else runs on a CPU decides, and what is no reason to stop there
    return Check(SPEED, None if quick.machine.platform == "cpu" else False, text)


def file_checks(run: Run, out: Path) -> list[Check]:
    """Checks of a rehearsal's checkpoint: an export or adapters, and a text."""
    adapters = [t.name for t in training_of(run).trainees] if run.lora is not None else []
    if jax.process_count() > 1:
        return _by_child(run, out, ADAPTERS if adapters else EXPORT)
    checks = [_tried(ADAPTERS, partial(_adapter, run, out / name, name)) for name in adapters]
    checks = checks or [_tried(EXPORT, lambda: _export(run, out / "model"))]
    return [*checks, _tried(WRITES, lambda: _text(run, adapters))]


def _tried(name: str, check: Callable[[], Check]) -> Check:
    """A check, or what it raised. What it prints is left out."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return check()
    except (UserError, RuntimeError) as error:  # the latter where a proof fails
        return Check(name, False, first_line(error))


def _export(run: Run, out: Path) -> Check:
    if getattr(run.model, "reasoning", None) is not None:
        return Check(EXPORT, None, "no Hugging Face architecture has reasoning layers")
    return _proven(EXPORT, export_command(run.dir, out))


def _proven(name: str, proof: Proof) -> Check:
    """A proof as a check: without transformers the files alone are proven."""
    there = proof.folder_to_transformers
    if there is None:
        return Check(name, True, f"tensors {proof.tensors}; transformers: {proof.transformers}")
    text = sentence(there, proof.outputs)
    return Check(name, True, f"opens in transformers {proof.transformers}: {text}")


def _adapter(run: Run, out: Path, name: str) -> Check:
    out.mkdir()
    export_adapter_command(run.dir, out / "peft", adapter=name)
    base = run.train.init_from
    if base is None:
        return Check(ADAPTERS, None, f"{name}: written; its base has no files of its own")
    if why := too_large(2 * count_params(spec_of(replace(run, lora=None)))):
        return Check(ADAPTERS, None, f"{name}: written; not compared, {why}")
    proof = merge_command(base, out / "peft", out / "merged")
    if proof.merged_to_peft is None:
        return Check(ADAPTERS, None, f"{name}: written and merged; PEFT: {proof.peft}")
    text = sentence(proof.merged_to_peft, proof.outputs)
    return Check(ADAPTERS, True, f"{name}: opens in PEFT {proof.peft}: {text}")


def _writes(run: Run) -> bool:
    """True for a model that continues a text or fills in masks; encoders do neither."""
    return run.model.fills_masks or not run.model.both_ways


def _text(run: Run, adapters: Sequence[str]) -> Check:
    if not _writes(run):
        return Check(WRITES, None, f"a {run.model.kind!r} continues no text")
    options = {"adapter": adapters[0]} if adapters else {}
    (text,) = generate_command(run.dir, [PROMPT], max_new_tokens=NEW_TOKENS, **options)
    return Check(WRITES, True, repr(PROMPT + text.text))


def _by_child(run: Run, out: Path, name: str) -> list[Check]:
    """Makes the checks in a process alone, on the CPU of the first host: each device here is one
    of many. A process that does not come to an end is the check of this name."""
    run_file = out / "run.toml"
    run_file.write_text(dump_toml(run))
    variables = {key: value for key, value in os.environ.items() if key not in CHILD}
    done = subprocess.run(
        [sys.executable, "-m", "lmwright.train.rehearsal_checks", run_file, out],
        env=variables | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return [Check(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
    return [Check(name, False, said[-1].strip())]


def _child(run_file: str, out: str) -> None:
    """Prints the checks of a rehearsal's checkpoint as JSON."""
    print(json.dumps([vars(check) for check in file_checks(load_run(run_file), Path(out))]))


if __name__ == "__main__":
    _child(*sys.argv[1:])
