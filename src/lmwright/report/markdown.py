"""report.md: what ran where, what it took and what came of it, for a grant giver or a model card.

Made from the same files as report.html. Chip-hours are those of slices where they are known, else
the running time times the chips of the machine.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmwright import __version__
from lmwright.errors import UserError
from lmwright.guard.terminal import visible
from lmwright.hardware.devices import chip_power, devices_per_chip
from lmwright.report.goodput import WORDS, Goodput, goodput
from lmwright.report.ledger import DEVICES, SPENT
from lmwright.report.paid import FACTS, parse_facts
from lmwright.report.read import RunRecord, Series, read_run
from lmwright.report.summary import hours_text, machine_rows, summarize
from lmwright.report.written import STDOUT, usual_file, write_page

CPU = "cpu"  # as JAX names its devices
MARKDOWN_FILE = "report.md"
MOST_INCIDENTS = 50
NO_INCIDENT = ("checkpoint", "compile")


def markdown_command(dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the page and prints its path: in the run directory, or in the current folder for
    several runs."""
    if out is None:
        out = usual_file(dirs, MARKDOWN_FILE)
    path = write_markdown(dirs, out)
    if out != STDOUT:
        print(f"report: {out}")
    return path


def write_markdown(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes `out` whole from the files of the run directories; returns its path on this machine.
    Raises UserError for a folder that is no run, for damaged files and for an unwritable `out`."""
    if not run_dirs:
        raise UserError("report: no run directory given; name one or more")
    if str(out).endswith((".html", ".htm")):
        raise UserError(f"{out}: --markdown writes Markdown; name it .md, or leave out --markdown")
    pages = [markdown_of(read_run(run_dir)) for run_dir in run_dirs]
    return write_page("\n\n".join(pages), out)


def markdown_of(record: RunRecord) -> str:
    """The page of one run as text."""
    parts = {
        "Results": _table(("", ""), summarize(record).items()),
        "Held-out loss": _losses(record),
        "Where it ran": _machines(record),
        "Time of the machines": _times(record),
        "Energy": _energy(record),
        "Incidents": _incidents(record),
        "Data": _data(record),
    }
    lines = [f"# {cell(record.name)}", ""]
    for title, text in parts.items():
        if text:
            lines += [f"## {title}", "", text, ""]
    made = f"{datetime.now(UTC):%Y-%m-%d}"
    lines.append(f"Made by lmwright {__version__} on {made} from the files of the run directory.")
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """Text that stays one cell of a table and no markup."""
    text = " ".join(visible(str(value)).split())
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [[cell(value) for value in row] for row in rows]
    if not lines:
        return ""
    return "\n".join(
        f"| {' | '.join(line)} |" for line in ([*map(cell, head)], ["---"] * len(head), *lines)
    )


def _losses(record: RunRecord) -> str:
    rows = []
    for source, curves in record.evals.items():
        loss = curves["loss"]
        points = list(zip(loss.values, loss.steps, strict=True))
        best, step = min([p for p in points if not math.isnan(p[0])] or points)
        ends = [f"{loss.values[0]:.4f} at {loss.steps[0]:,}", f"{best:.4f} at {step:,}"]
        last = f"{loss.values[-1]:.4f} at {loss.steps[-1]:,}"
        rows.append((source, *ends, last, *(_last(curves, n) for n in ("ppl", "bits_per_byte"))))
    head = ("source", "first, at step", "best", "last", "perplexity", "bits per byte")
    return _table(head, rows)


def _last(curves: dict[str, Series], name: str) -> str:
    return f"{curves[name].values[-1]:,.4g}" if name in curves else ""


def _machines(record: RunRecord) -> str:
    """The machines of a run, and its sessions."""
    earlier = record.env.get("earlier")
    every = [*(earlier if isinstance(earlier, list) else []), record.env]
    machines = [machine_rows(env) for env in every if isinstance(env, dict) and env]
    parts = [
        _table(("machine", "software"), ((m["machine"], m["software"]) for m in machines)),
        _table(("session", "began (UTC)", "time", "steps"), _sessions(record)),
    ]
    return "\n\n".join(filter(None, parts))


def _sessions(record: RunRecord) -> Iterator[tuple[str, ...]]:
    for number, session in enumerate(record.sessions, 1):
        try:
            began = f"{datetime.fromtimestamp(session['began'], UTC):%Y-%m-%d %H:%M}"
        except (OverflowError, OSError, ValueError):
            began = "?"
        steps = f"{session['first_step']:,} to {session['last_step']:,}"
        yield str(number), began, hours_text(session["seconds"] / 3600), steps


def chip_hours(record: RunRecord, measured: Goodput) -> dict[str, float]:
    """Chip-hours of all sessions by the kind of their devices, without those on CPUs. A session
    that does not tell its devices had those of the last one."""
    env, hours = record.env, Counter[str]()
    last = {"kind": str(env.get("device_kind", "")), "count": env.get("device_count")}
    if env.get("device_platform", "cpu") == "cpu":
        last["kind"] = CPU
    for session in record.sessions:
        if SPENT not in session or parse_facts(session.get(FACTS)) is not None:
            continue  # of slices all is known together
        told = session.get(DEVICES)
        kind, count = ((told if isinstance(told, dict) else last).get(k) for k in ("kind", "count"))
        if isinstance(kind, str) and isinstance(count, int) and kind != CPU:
            hours[kind] += session["seconds"] / 3600 * count / devices_per_chip(kind)
    if measured.slices is not None:
        hours[last["kind"]] += measured.slices.chip_hours
    return dict(hours)


def _times(record: RunRecord) -> str:
    if (measured := goodput(record.sessions)) is None:
        return ""
    hours = sum(chip_hours(record, measured).values())
    purposes = {"steps that count": measured.productive_s}
    purposes |= {WORDS[name]: seconds for name, seconds in measured.lost_s.items()}
    rows = []
    for name, seconds in [*purposes.items(), ("together", measured.total_s)]:
        share = seconds / measured.total_s
        chips = (f"{hours * share:,.4g}",) if hours else ()
        rows.append((name, hours_text(seconds / 3600), f"{share:.1%}", *chips))
    head = ("purpose", "time", "share", *(("chip-hours",) if hours else ()))
    text = _table(head, rows)
    if (slices := measured.slices) is not None:
        text += (
            f"\n\n{slices.chip_hours:,.4g} chip-hours cost {slices.cost:,.2f} USD by the list "
            f"price, after {hours_text(slices.queue_s / 3600)} in the queue."
        )
    return text


def _energy(record: RunRecord) -> str:
    measured = goodput(record.sessions)
    every = chip_hours(record, measured) if measured is not None else {}
    return "\n\n".join(_energy_of(kind, hours) for kind, hours in every.items())


def _energy_of(kind: str, hours: float) -> str:
    if (power := chip_power(kind)) is None:
        return f"Not known: the power of {cell(kind)} is not published."
    high = hours * power.most_w / 1000
    if power.least_w is None:
        interval, watts = f"At most {high:,.3g} kWh", f"at most {power.most_w:.0f} W"
    else:
        low = hours * power.least_w / 1000
        interval = f"Between {low:,.3g} and {high:,.3g} kWh"
        watts = f"{power.least_w:.0f} to {power.most_w:.0f} W"
    return (
        f"{interval}: {hours:,.4g} chip-hours of {cell(kind)} at {watts} a chip ({power.source}). "
        f"Hosts, network and cooling are not in it."
    )


def _incidents(record: RunRecord) -> str:
    """Events of a run but for saves and compiles; the saves are counted."""
    events = [event for event in record.events if event["kind"] not in NO_INCIDENT]
    saves = sum(event["kind"] == "checkpoint" for event in record.events)
    lines = [f"Checkpoints saved: {saves:,}."]
    if not events:
        return "\n\n".join([*lines, "Nothing else happened."])
    counts = Counter(event["kind"] for event in events)
    lines.append(", ".join(f"{count:,} x {cell(kind)}" for kind, count in counts.items()) + ".")
    rows = []
    for event in events[:MOST_INCIDENTS]:
        fields = {k: v for k, v in event.items() if k not in ("step", "time", "kind")}
        when = f"{datetime.fromtimestamp(event['time'], UTC):%Y-%m-%d %H:%M}"
        details = ", ".join(f"{name} {value}" for name, value in fields.items())
        rows.append((f"{event['step']:,}", when, event["kind"], details))
    lines.append(_table(("step", "when (UTC)", "what", "details"), rows))
    if len(events) > MOST_INCIDENTS:
        lines.append(f"and {len(events) - MOST_INCIDENTS:,} more, in metrics.jsonl.")
    return "\n\n".join(lines)


def _data(record: RunRecord) -> str:
    """Sources of a run, as its configuration names them."""
    rows = []
    number = 0
    while (path := record.config.get(f"data.sources.{number}.path")) is not None:
        name = record.config.get(f"data.sources.{number}.name") or Path(str(path)).name
        use = record.config.get(f"data.sources.{number}.use", "train")
        weight = record.config.get(f"data.sources.{number}.weight")
        rows.append((name, path, use, "" if weight is None else weight))
        number += 1
    return _table(("source", "path", "use", "weight"), rows)
