"""`lmwright eval --tasks`: prints a model's scores, keeps them in its run directory, and compares
them with another model's."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lmwright.errors import UserError
from lmwright.evals.answers import read_answers
from lmwright.evals.compare_answers import compare_answers, difference_table
from lmwright.evals.compute import compute_text
from lmwright.evals.kept import kept_in_run
from lmwright.evals.streamed import refuse_no_folder
from lmwright.evals.tables import table_of
from lmwright.evals.tasks import Score, TaskScores, task_scores
from lmwright.formats.load import load_model
from lmwright.guard.temporary import write_output
from lmwright.guard.terminal import print_table
from lmwright.report.measured import Line


def eval_tasks_command(
    path: str, tasks: str | None = None, *, out: str | None = None, adapter: str | None = None,
    against: str | None = None, devices: int | None = None, **options: Any,
) -> int:  # fmt: skip
    """Prints a model's scores in tasks, names or files with commas between, and keeps them in its
    run directory; writes all that is known of each question to the file `out`, and compares with
    such a file, `against`. Without tasks, `path` is such a file, too. `options` are those of
    `task_scores`. Returns 0."""
    other = None if against is None else read_answers(Path(against))
    if tasks is None:
        if not path.endswith(".json"):
            raise UserError(
                f"--against: the answers of {path} are not known; give --tasks as well, or a file "
                "that --out wrote (.json) in place of the model"
            )
        _print_comparison(other or {}, read_answers(Path(path)))
        return 0
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: names no task; give for example --tasks arc_easy")
    if out is not None and Path(out).exists():
        raise UserError(f"{out}: exists; give --out another name")
    if out is not None:
        refuse_no_folder(Path(out))
    loaded = load_model(path, adapter, num_devices=devices, copies=True)
    shown = Console(file=sys.stderr)
    with Progress(transient=True, console=shown, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("questions", total=None)
        found = task_scores(
            loaded, names, on_progress=lambda **now: progress.update(bar, **now), **options
        )
    lines = list(_lines(found.scores, bool(options.get("chat"))))
    with kept_in_run(path, loaded.step, lines, adapter):
        _print_scores(found)
    if out is not None:
        text = json.dumps(dict(found.details), indent=1, default=str, ensure_ascii=False)
        write_output(Path(out), text + "\n")
        print(f"every question and answer: {out}")
    if other is not None:
        _print_comparison(other, found.details)
    return 0


def _print_scores(found: TaskScores) -> None:
    console = Console()
    print_table(console, score_table(found.scores))
    devices = found.num_devices, found.num_copies
    for line in (*found.notes, compute_text(found.compute, *devices)):
        console.print(line, highlight=False, soft_wrap=True)


def _print_comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    console, found = Console(), compare_answers(before, after)
    print_table(console, difference_table(found.differences))
    for note in found.notes:
        console.print(note, highlight=False, soft_wrap=True)


def score_table(scores: Sequence[Score]) -> Table:
    """The figures as a table."""
    rows = [
        (s.task, str(s.shots), str(s.questions), s.metric, _number(s.value),
         "" if s.stderr is None else f"\u00b1 {_number(s.stderr)}")
        for s in scores
    ]  # fmt: skip
    return table_of(("task", "shots", "questions", "metric", "value", "standard error"), rows)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def _lines(scores: Sequence[Score], chat: bool) -> Iterator[Line]:
    """The lines that are kept in the run directory, one for each task."""
    for task, own in groupby(scores, key=lambda score: score.task):
        figures = list(own)
        yield {
            "kind": "task", "source": task, "shots": figures[0].shots, "chat": chat,
            "questions": figures[0].questions,
            "scores": {s.metric: s.value for s in figures if math.isfinite(s.value)},
            "errors": {s.metric: s.stderr for s in figures if s.stderr is not None},
        }  # fmt: skip
