"""report.html: one self-contained page about one run, or several side by side.

    run_dir/* --read--> RunRecord --page--> template.html.j2 (tables) + report.js (curves)

The curves are drawn by plotly.js, taken from the plotly package and packed into the page
(gzip, 2 MB): zoom, hover and export are then a kept library's work. The page forbids itself
every network access by its content security policy. All text is escaped.
"""

import base64
import gzip
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lmwright import __version__
from lmwright.errors import UserError
from lmwright.report.curves import curves_of, points_per_curve
from lmwright.report.goodput import goodput, ledger
from lmwright.report.long_context import needle_plots, position_plot
from lmwright.report.profile import profile_of, profile_rows
from lmwright.report.read import RunRecord, Sample, flatten, read_run
from lmwright.report.summary import headline, hours_text, summarize
from lmwright.report.written import STDOUT, usual_file, write_page
from lmwright.storage.mirror import mirror_folder

REPORT_FILE = "report.html"
PAGE_DIR = Path(__file__).parent
ALWAYS_DIFFERENT = ("name", "dir")


def report_command(dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the report and prints its path: in the run directory, or in the current folder for
    several runs."""
    if out is None:
        out = usual_file(dirs, REPORT_FILE)
    path = write_report(dirs, out)
    if out != STDOUT:
        print(f"report: {out} ({path.stat().st_size / 1e6:.1f} MB; open it in a browser)")
    return path


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes `out` atomically from the files of the run directories; returns its path on this
    machine.

    Runs keep their order, which gives them their colors. Raises UserError for a folder that
    is no run, for damaged files (naming file and line) and for an unwritable `out`.
    """
    return write_page(render(read_runs(run_dirs)), out)


def read_runs(run_dirs: Sequence[str | Path]) -> list[RunRecord]:
    """The runs in their order, each once. Raises UserError for a folder that is no run and for
    damaged files."""
    if not run_dirs:
        raise UserError("report: no run directory given; name one or more")
    unique = {mirror_folder(run_dir).resolve(): run_dir for run_dir in run_dirs}
    return [read_run(run_dir) for run_dir in unique.values()]


def render(records: Sequence[RunRecord], *, reload_s: int | None = None) -> str:
    """The page as HTML text, which a browser reloads every `reload_s` seconds."""
    labels = unique_labels(records)
    limit = points_per_curve(len(records))
    curves = [
        curves_of(record, label, limit) for record, label in zip(records, labels, strict=True)
    ]
    groups = [group for r in records for group in (r.train, *r.evals.values())]
    longest = max(len(series.steps) for group in groups for series in group.values())
    configs = [record.config for record in records]
    measured = [goodput(record.sessions) for record in records]
    times = [ledger(each) if each else {} for each in measured]
    profiles = [profile_of(record) for record in records]
    profiled = [profile_rows(each) if each else {} for each in profiles]
    tables = {
        "Configuration": [flatten(config) for config in configs],
        "Plan": [flatten(record.plan) for record in records],
        "Environment": [flatten(record.env) for record in records],
    }
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE_DIR), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return env.get_template("template.html.j2").render(
        reload_s=reload_s,
        labels=labels,
        subtitle=_subtitle(records),
        tiles=headline(records[0]) if len(records) == 1 else [],
        # without marks: results nearly always differ
        summary=[r | {"differs": False} for r in side_by_side([*map(summarize, records)])],
        times=side_by_side(times) if any(times) else [],
        profile=side_by_side(profiled) if any(profiled) else [],
        differences=differences(configs) if len(records) > 1 else None,
        positions=position_plot(records, labels),
        needles=needle_plots(records, labels),
        samples=_samples(records, labels),
        events=_events(records, labels),
        tables=[(title, side_by_side(parts)) for title, parts in tables.items() if any(parts)],
        version=__version__,
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        thinned=f"{limit:,}" if longest > limit else None,
        # htmlsafe: no text in the data can end the script element that holds it.
        data=Markup(jinja2.utils.htmlsafe_json_dumps({"runs": curves}, allow_nan=False)),
        plotly=Markup(_pack_plotly()),
        css=Markup((PAGE_DIR / "report.css").read_text()),
        js=Markup((PAGE_DIR / "report.js").read_text()),
    )


def unique_labels(records: Sequence[RunRecord]) -> list[str]:
    """Names of the runs, with the folder where two runs have the same name."""
    names = [record.name for record in records]
    return [
        name if names.count(name) == 1 else f"{name} ({record.dir})"
        for name, record in zip(names, records, strict=True)
    ]


def side_by_side(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per key of any column: key, text of each column or None, and whether they differ."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        texts = [_text(column[key]) if key in column else None for column in columns]
        rows.append({"key": key, "texts": texts, "differs": len(set(texts)) > 1})
    return rows


def differences(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in which the configurations differ, ignoring name and folder."""
    return [
        row
        for row in side_by_side(configs)
        if row["differs"] and row["key"] not in ALWAYS_DIFFERENT
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value) or "(empty)"
    return "-" if value is None else str(value)


def _subtitle(records: Sequence[RunRecord]) -> str:
    if len(records) > 1:
        return f"{len(records)} runs side by side"
    record = records[0]
    steps = record.hours.steps[-1] if record.hours.steps else 0
    hours = record.hours.values[-1] if record.hours.values else 0.0
    return f"{record.dir}: {steps:,} steps, running for {hours_text(hours)}"


def _samples(records: Sequence[RunRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts in order, each with the newest text of every run and the earlier ones below it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record, label in zip(records, labels, strict=True):
        by_prompt: dict[str, list[Sample]] = {}
        for sample in record.samples:
            by_prompt.setdefault(sample.prompt, []).append(sample)
        for prompt, samples in by_prompt.items():
            entry = {"label": label, "latest": samples[-1], "earlier": samples[-2::-1]}
            groups.setdefault(prompt, []).append(entry)
    return [{"prompt": prompt, "runs": runs} for prompt, runs in groups.items()]


def _events(records: Sequence[RunRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Events of the runs without the hundreds of saves, which are summed up above."""
    rows = []
    for record, label in zip(records, labels, strict=True):
        for event in record.events:
            if event["kind"] == "checkpoint":
                continue
            fields = {k: v for k, v in event.items() if k not in ("step", "time", "kind")}
            rows.append(
                {
                    "label": label,
                    "step": event["step"],
                    "kind": event["kind"],
                    "when": f"{datetime.fromtimestamp(event['time'], UTC):%Y-%m-%d %H:%M:%S}",
                    "details": ", ".join(f"{k} {_number(v)}" for k, v in fields.items()),
                }
            )
    return rows


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _text(value)


@cache
def _pack_plotly() -> str:
    """plotly.js, gzipped, as base64, for a script that unpacks it."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
