"""Summary figures at the top of a report: results, cost and machine."""

import math
import re
from typing import Any

import numpy as np

from lmwright.report.goodput import goodput, ledger
from lmwright.report.read import RunRecord, Series

Rows = dict[str, str]

SCORES = (
    "accuracy", "micro_f1", "macro_f1", "matthews", "entity_f1", "exact_match", "answer_f1",
    "pearson", "spearman", "accuracy_at_1", "mrr_at_10", "detector_accuracy", "detector_recall",
    "replaced_share",
)  # fmt: skip
"""Scores of held-out rows, beside their loss."""


def summarize(record: RunRecord) -> Rows:
    """Labels and texts in display order; figures that were not measured are left out."""
    return {
        label: text
        for part in (_outcome(record), _size(record), _cost(record), _machine(record))
        for label, text in part.items()
        if text
    }


def headline(record: RunRecord) -> list[tuple[str, str, str]]:
    """The most important (label, value, note) triples, for the tiles of a single run."""
    tiles = []
    for source, curves in list(record.evals.items())[:2]:
        note = f"perplexity {curves['ppl'].values[-1]:,.2f}" if "ppl" in curves else ""
        if "accuracy" in curves:
            note = f"accuracy {curves['accuracy'].values[-1]:.1%}"
        if "micro_f1" in curves:
            note += f", micro F1 {curves['micro_f1'].values[-1]:.3f}"
        if "entity_f1" in curves:
            note += f", entity F1 {curves['entity_f1'].values[-1]:.3f}"
        if "answer_f1" in curves:
            exact, f1 = (100 * curves[n].values[-1] for n in ("exact_match", "answer_f1"))
            note = f"exact match {exact:.1f}, F1 {f1:.1f}"
        if "spearman" in curves:
            note = f"Spearman {curves['spearman'].values[-1]:.3f}"
        if "bits_per_byte" in curves:
            note += f", {curves['bits_per_byte'].values[-1]:.3f} bits per byte"
        if "of_rows" in curves:
            note += f", {_rows(curves)}" if note else _rows(curves)
        tiles.append((f"held-out loss, {source}", _loss(curves["loss"].values[-1]), note))
    if "loss" in record.train:
        loss = record.train["loss"]
        note = f"at step {loss.steps[-1]:,}"
        tiles.append(("training loss", _loss(tail_mean(loss)), note))
    summary = _size(record) | _cost(record)
    for label in ("parameters", "tokens seen"):
        if label in summary:
            tiles.append((label, short(int(summary[label].replace(",", ""))), summary[label]))
    if "tokens/s" in summary:
        tiles.append(("tokens/s", summary["tokens/s"], "median"))
    return tiles


def tail_mean(series: Series) -> float:
    """Mean of the last twentieth of a curve (at least one point): steadier than its last value."""
    return float(np.mean(series.values[-max(len(series.values) // 20, 1) :]))


def _outcome(record: RunRecord) -> Rows:
    rows = {}
    if "loss" in record.train:
        loss = record.train["loss"]
        rows["training loss (mean of the last 5 %)"] = _loss(tail_mean(loss))
        bad = [s for s, v in zip(loss.steps, loss.values, strict=True) if not math.isfinite(v)]
        if bad:
            rows["training loss not finite"] = f"first at step {bad[0]:,}, {len(bad):,} times"
    for source, curves in record.evals.items():
        rows |= _held_out_rows(source, curves)
    return rows | _gradient_rows(record)


def _gradient_rows(record: RunRecord) -> Rows:
    """The newest gradient error that was measured (`train.gradient_error`)."""
    found = [e for e in record.events if e["kind"] == "gradient error" and "error" in e]
    if not found:
        return {}
    newest = found[-1]
    error, parts = float(newest["error"]), [k for k in newest if k.endswith(" error")]
    text = f"{error:.2%} at step {newest['step']:,}, by {newest['setting']}"
    if parts:
        worst = max(parts, key=lambda name: float(newest[name]))
        text += f" (most in {worst.removesuffix(' error')}: {float(newest[worst]):.2%})"
    return {"gradients changed": text}


def _held_out_rows(source: str, curves: dict[str, Series]) -> Rows:
    loss = curves["loss"]
    text = _loss(loss.values[-1])
    points = [(v, s) for v, s in zip(loss.values, loss.steps, strict=True) if not math.isnan(v)]
    if points and not min(points)[0] >= loss.values[-1]:  # which may be NaN
        best, step = min(points)
        text += f" (best {_loss(best)} at step {step:,})"
    if "of_rows" in curves:
        text += f", over {_rows(curves)}"
    rows = {f"held-out loss, {source}": text}
    if "ppl" in curves:
        rows[f"perplexity, {source}"] = f"{curves['ppl'].values[-1]:,.2f}"
    for name in SCORES:
        if name in curves:
            rows[f"{name.replace('_', ' ')}, {source}"] = f"{curves[name].values[-1]:.4f}"
    if "bits_per_byte" in curves:
        rows[f"bits per byte, {source}"] = f"{curves['bits_per_byte'].values[-1]:.4f}"
    return rows


def _rows(curves: dict[str, Series]) -> str:
    return f"{curves['rows'].values[-1]:,.0f} of {curves['of_rows'].values[-1]:,.0f} rows"


def _size(record: RunRecord) -> Rows:
    rows = {}
    if isinstance(params := record.plan.get("num_params"), int):
        rows["parameters"] = f"{params:,}"
    if steps := record.hours.steps:
        rows["steps"] = f"{steps[-1]:,}"
        if total := _planned_steps(record):
            rows["steps"] += f" of {total:,}"
    seen = record.train["tokens_seen"].values[-1] if "tokens_seen" in record.train else math.nan
    if math.isfinite(seen):
        rows["tokens seen"] = f"{int(seen):,}"
    return rows


def _planned_steps(record: RunRecord) -> int:
    """Steps of the run, or of its adapter that trains longest; 0 where it does not say them."""
    names = re.compile(r"train\.steps|lora\.adapters\.\d+\.steps")
    said = [value for key, value in record.config.items() if names.fullmatch(key)]
    return max((steps for steps in said if isinstance(steps, int)), default=0)


def _cost(record: RunRecord) -> Rows:
    rows = {}
    if record.hours.values:
        rows["time running"] = hours_text(record.hours.values[-1])
    if measured := goodput(record.sessions):
        rows["goodput"] = measured.text()
        costs = ledger(measured)
        rows |= {name: costs[name] for name in ("queue", "chip-hours", "cost") if name in costs}
    formats = {
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "step_time_p50_s": ("step time, median", "{:.4g} s"),
        "input_wait_share": ("waiting for input", "{:.2%}"),
        "mfu": ("MFU", "{:.1%}"),
    }
    for name, (label, text) in formats.items():
        if name in record.train:
            rows[label] = text.format(float(np.nanmedian(record.train[name].values)))
    if "peak_memory_bytes" in record.train:
        peak = max(record.train["peak_memory_bytes"].values)
        rows["peak memory"] = f"{peak / 2**30:.2f} GiB"
    saves = [
        e["blocked_s"] for e in record.events if e["kind"] == "checkpoint" and "blocked_s" in e
    ]
    if saves:
        rows["checkpoints"] = (
            f"{len(saves)} saved, training held up {np.mean(saves):.2g} s each time"
        )
    if record.resumes:
        rows["resumed"] = "at step " + ", ".join(f"{step:,}" for step in record.resumes)
    return rows


def _machine(record: RunRecord) -> Rows:
    return machine_rows(record.env) if record.env else {}


def machine_rows(env: dict[str, Any]) -> Rows:
    """Machine and software of an env.json."""
    name = env.get("device_kind", "")
    if env.get("device_platform") == "cpu":
        name = f"{env.get('cpu', 'CPU')}, {env.get('cpu_cores', '?')} cores"
        if isinstance(memory := env.get("memory_bytes"), int):
            name += f", {memory / 2**30:.0f} GiB"
    elif count := env.get("device_count"):
        name = f"{count} x {name}"
    packages = env.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    names = ("lmwright", "podsmith", "jax")  # podsmith: what lmwright was called until 0.2
    software = [f"{each} {packages[each]}" for each in names if each in packages]
    return {"machine": str(name), "software": ", ".join(software)}


def _loss(value: float) -> str:
    return f"{value:.4f}"


def short(number: float) -> str:
    """A number with three digits and a unit: `950`, `12.3k`, `4.56M`, `1.2B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * limit:  # which is the limit in three digits
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def hours_text(hours: float) -> str:
    """Hours as `48 s`, `12.4 min` or `3.21 h`."""
    if hours < 1 / 60:
        return f"{hours * 3600:.3g} s"
    return f"{hours * 60:.1f} min" if hours < 1 else f"{hours:.2f} h"
