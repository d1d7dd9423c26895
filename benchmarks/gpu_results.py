"""Results of `train_gpu.py`: a line of JSON for each contestant of a row, and tables of them."""

import json
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_rows import ROWS, Records, Row, ours, speed

HERE = Path(__file__).resolve().parent
SMI = ("nvidia-smi", "--format=csv,noheader,nounits")
CARD = "name,driver_version,memory.total,memory.used"


def _said(command: Sequence[str]) -> str:
    """First line that a command prints; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=HERE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def machine(device: str) -> dict[str, Any]:
    """The first card and its driver, or the CPU; with the memory that others hold."""
    about = {"python": platform.python_version(), "commit": _said(("git", "rev-parse", "HEAD"))}
    said = _said((*SMI, f"--query-gpu={CARD}")) if device == "gpu" else ""
    if not said:
        kind = "CPU" if device == "cpu" else "no card that nvidia-smi knows"
        return about | {"name": f"{kind}, {platform.machine()}"}
    name, driver, total, used = (word.strip() for word in said.split(","))
    return about | {"name": name, "driver": driver, "mib": int(total), "mib_before": int(used)}


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a record to a file."""
    when = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record, **when}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a file, the oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything that another measurement must share to take the place of a record."""
    names = ("row", "contestant", "tiny", "changes")
    return record["machine"]["name"], *(json.dumps(record.get(name)) for name in names)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """Tables in Markdown, one for each card: the last record of each contestant, and the goals."""
    cards: dict[str, dict[tuple[Any, ...], Mapping[str, Any]]] = defaultdict(dict)
    for record in records:
        tiny = ", tiny shapes" if record["tiny"] else ""
        cards[record["machine"]["name"] + tiny][key(record)] = record
    return "\n\n".join(_card(name, list(last.values())) for name, last in cards.items())


def _card(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"### {name}", "", "; ".join(_software(records)), ""]
    lines += ["| row | contestant | tokens/s | from - to | ours / it | peak GiB | second step, s |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    goals = ["| row | goal | measured | |", "|---|---|---:|---|"]
    for row_name, row in ROWS.items():
        own = [r for r in records if r["row"] == row_name]
        plain = {r["contestant"]: r for r in own if not r.get("changes")}
        ours_at = speed(ours(plain))
        lines += [_line(row_name, record, ours_at) for record in sorted(own, key=_order(row))]
        goals += _goals(row_name, row, plain) if plain else []
    return "\n".join([*lines, "", *goals])


def _order(row: Row) -> Any:
    return lambda record: row.contestants.index(record["contestant"])


def _software(records: Sequence[Mapping[str, Any]]) -> list[str]:
    drivers = sorted({r["machine"]["driver"] for r in records if "driver" in r["machine"]})
    packages = sorted({pair for r in records for pair in r.get("versions", {}).items()})
    commits = sorted({r["machine"]["commit"][:10] for r in records if r["machine"]["commit"]})
    said = [f"driver {', '.join(drivers)}"] if drivers else []
    said += [", ".join(" ".join(pair) for pair in packages)] if packages else []
    return [*said, *([f"lmwright at {', '.join(commits)}"] if commits else [])]


def _line(row: str, record: Mapping[str, Any], our_speed: float | None) -> str:
    chosen = [f"remat {record['remat']}"] if "remat" in record else []
    chosen += [record["attention"]] if record.get("attention") else []
    who = " ".join([record["contestant"], *record.get("changes", ())])
    who += f" ({', '.join(chosen)})" if chosen else ""
    median = speed(record)
    if median is None:
        return f"| {row} | {who} | {record['error'].replace('|', '/')[:90]} | | | | |"
    rounds, peak = record["tokens_per_s"], record["peak_bytes"] / 2**30
    spread = f"{min(rounds):,.0f} - {max(rounds):,.0f}"
    times = f"{our_speed / median:.2f}" if our_speed else ""
    ready = "" if "beside" in record else f"{record['ready_s']:.0f}"
    cells = (row, who, f"{median:,.0f}", spread, times, f"{peak:.1f}", ready)
    return f"| {' | '.join(cells)} |"


def _goals(name: str, row: Row, records: Records) -> list[str]:
    lines = []
    for goal in row.goals:
        number = goal.measured(records)
        known = "" if number is None else f"{number:.2f}"
        verdict = "" if number is None else ("met" if goal.met(number) else "missed")
        lines.append(f"| {name} | {goal.text} | {known} | {verdict} |")
    return lines
