"""Sweep: a small grid of runs from one run file, and one report that compares them.

    [sweep.grid]  a = [1, 2], b = [3, 4]   ---> (1, 3) (1, 4) (2, 3) (2, 4)   each a run
    [[sweep.cases]]  name, a, b            ---> one run each                  in <dir>/<label>
                                                          |
    <dir>/report.html, a table  <-------------------------+        (sweep.html beside a run's own)

All runs are validated, and compared with the data that is prepared, before the first one starts.
They are trained one after another, each in a process of its own; what was stopped is taken up
where it was when the sweep is run again.
"""

import itertools
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from lmwright.config.load import dump_toml
from lmwright.config.merge import COMMAND_LINE
from lmwright.config.run import Run
from lmwright.config.text import Keys, join_keys, line_of, literal, read_toml
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.formats.open import load_base, load_run
from lmwright.guard.files import write_whole
from lmwright.guard.parent import with_parent
from lmwright.guard.unread import EXIT_UNREAD
from lmwright.planner.sessions import session_limit_s
from lmwright.storage.mirror import mirror_folder, place_in
from lmwright.train.signals import (
    EXIT_PREEMPTED,
    EXIT_SESSION_OVER,
    EXIT_TIME_SPENT,
    HANGUP,
    StopRequest,
)

EXIT_SOME_FAILED = 1
MOST_RUNS = 100
FILES = (".toml", ".html")
LINE = "{:<{width}}  {:>14}  {:>10}  {:>10}  {:>9}"


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    label: str
    run: Run
    where: str
    """Place of its fields, for messages."""

    @property
    def folder(self) -> Path:
        return mirror_folder(self.run.dir)


def members(path: str | Path, overrides: Sequence[str] = ()) -> list[Member]:
    """Runs that a file's [sweep] describes, each validated.

    Raises UserError where there is none, or where one of them is not a valid run.
    """
    path = Path(path)
    values, lines = read_toml(path)
    table = values.get("sweep")
    if table is None:
        raise UserError(
            f"{path}: has no [sweep]; add one, such as\n  [sweep.grid]\n  "
            f'"model.num_kv_heads" = [8, 2, 1]'
        )
    base = load_base(path, overrides)
    by_label: dict[str, Member] = {}
    combinations = list(_combinations(path, table))
    _refuse_idle(overrides, [fields for _, _, fields in combinations])
    for keys, label, fields in combinations:
        _check_member(path, label, fields)
        if label in by_label:
            raise UserError(f"{path}: sweep: two runs are called {label!r}; rename one")
        words = [f"{key}={literal(value)}" for key, value in fields.items()]
        own = [f"name={base.name}-{label}", f"dir={place_in(base.dir, label)}"]
        line = line_of(lines, keys)
        where = f"{path}:{line}: {_header(keys)}, {label}" if line else f"{path}: {label}"
        try:
            run = load_base(path, [*overrides, *words, *own])
        except UserError as error:
            raise _of_member(error, where) from error
        by_label[label] = Member(label, run, where)
    return list(by_label.values())


def _header(keys: Keys) -> str:
    return f"[[{join_keys(keys[:-1])}]]" if isinstance(keys[-1], int) else f"[{join_keys(keys)}]"


def _of_member(error: UserError, where: str) -> UserError:
    """The error of a run, told of the place of its fields, which are loaded like overrides."""
    text = re.sub(rf"^( *){COMMAND_LINE}: ", r"\1", str(error), flags=re.MULTILINE)
    return type(error)(f"{where}: {text.replace(f' on the {COMMAND_LINE}', '')}")


def _combinations(path: Path, table: Any) -> Iterator[tuple[Keys, str, dict[str, Any]]]:
    """Keys of the table, label and fields of each run."""
    known = {"grid", "cases"}
    if not isinstance(table, dict) or not table or set(table) - known:
        raise UserError(f"{path}: sweep must hold [sweep.grid], [[sweep.cases]] or both")
    grid, cases = table.get("grid", {}), table.get("cases", [])
    if not (isinstance(grid, dict) and isinstance(cases, list)):
        raise UserError(f"{path}: sweep must hold tables: [sweep.grid], [[sweep.cases]] or both")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: sweep.grid.{key} must be a list of values to try")
    count = 1
    for values in grid.values():
        count *= len(values)
    if count > MOST_RUNS:
        raise UserError(f"{path}: sweep.grid makes {count} runs; {MOST_RUNS} at most")
    for values in itertools.product(*grid.values()) if grid else ():
        fields = dict(zip(grid, values, strict=True))
        yield ("sweep", "grid"), _label(fields), fields
    for number, case in enumerate(cases):
        fields = dict(case) if isinstance(case, dict) else {}
        name = fields.pop("name", None)
        if not isinstance(name, str) or not fields:
            raise UserError(
                f"{path}: sweep.cases.{number} must hold a name and the fields it sets, "
                f'as in name = "deep", "model.num_layers" = 24'
            )
        yield ("sweep", "cases", number), _plain(name), fields


def _check_member(path: Path, label: str, fields: dict[str, Any]) -> None:
    """Raises UserError for a run whose folder would be another file's, and for fields that the
    sweep sets itself."""
    if not label or label.endswith(FILES):
        raise UserError(
            f"{path}: sweep: {label!r} cannot be the folder of a run, beside the sweep's own "
            "files; give the case another name"
        )
    for name in ("dir", "name"):
        if name in fields:
            raise UserError(
                f"{path}: sweep: {name!r} has no effect in {label!r}, since each run has its own "
                "by its label; remove it there"
            )


def _refuse_idle(overrides: Sequence[str], combinations: Sequence[dict[str, Any]]) -> None:
    """Raises UserError for an override of a field that every run of the sweep sets itself."""
    for field in (word.partition("=")[0] for word in overrides):
        if combinations and all(field in fields for fields in combinations):
            raise UserError(
                f"command line: {field}: has no effect, since every run of the sweep has its own; "
                "leave it out, or change [sweep]"
            )


def _label(fields: dict[str, Any]) -> str:
    return _plain("_".join(f"{key.rsplit('.', 1)[-1]}-{value}" for key, value in fields.items()))


def _plain(text: str) -> str:
    """Text that is suitable as the name of a folder."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-.")


def sweep_command(path: str, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Trains every member, prints a comparison and writes the report; returns the exit code."""
    from lmwright.train.sweep_checks import refuse_data

    runs = members(path, overrides)
    refuse_data([(member.where, member.run) for member in runs])
    _print_members(runs)
    if dry_run:
        return 0
    runs = [_with_data(member) for member in runs]
    failed: list[str] = []
    spent: list[str] = []
    began = time.monotonic()
    with Children() as children:
        for number, member in enumerate(runs, 1):
            print(f"\n{member.label} ({number} of {len(runs)})", flush=True)
            code = children.exit_code or _train(member, children, time.monotonic() - began)
            if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_SESSION_OVER, EXIT_UNREAD):
                again = shlex.join(["lmwright", "sweep", str(path), *overrides])
                print(f"sweep: stopped; continue with: {again}", file=sys.stderr)
                return code
            if code:
                (spent if code == EXIT_TIME_SPENT else failed).append(member.label)
    done = [member for member in runs if member.label not in failed]
    if done:
        _compare(done, _page(done[0].run.dir.rpartition("/")[0] or "."))
    if failed:
        print(f"sweep: failed: {', '.join(failed)} (see above)", file=sys.stderr)
    if spent:
        print(
            f"sweep: limits.total_hours are spent before the last step of: {', '.join(spent)}; "
            "compared as they are",
            file=sys.stderr,
        )
    return EXIT_SOME_FAILED if failed else EXIT_TIME_SPENT if spent else 0


def _print_members(runs: list[Member]) -> None:
    from lmwright.core.param import count_params
    from lmwright.program.trainee import spec_of

    width = max(len(member.label) for member in runs)
    for member in runs:
        train, count = member.run.train, count_params(spec_of(member.run))
        length = f"{train.epochs:>7g} epochs" if train.steps is None else f"{train.steps:>7,} steps"
        print(f"{member.label:<{width}}  {count:>14,} parameters  {length}")


def _with_data(member: Member) -> Member:
    """A member of `train.epochs` whose data is prepared, and whose schedule is fitted to it."""
    from lmwright.train.prepared import prepare_first

    if member.run.train.epochs is None:
        return member
    try:
        prepare_first(member.run, lambda: member.run, pod=False)
    except UserError as error:
        raise error.at(member.where) from error
    return replace(member, run=load_run(member.run))  # which an earlier member may have prepared


def _train(member: Member, children: "Children", used_s: float) -> int:
    """Trains a member on a machine whose session began `used_s` seconds ago; its exit code."""
    run = _in_session(member.run, used_s)
    if run is None:
        return EXIT_SESSION_OVER
    folder = member.folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{member.label}.toml"
    write_whole(file, dump_toml(run))
    return children.run([sys.executable, "-m", "lmwright.cli.main", "train", str(file)])


def _in_session(run: Run, used_s: float) -> Run | None:
    """The run with what earlier ones have left of the machine's session; None where that is
    nothing."""
    limits = run.limits
    if limits.session_hours is None:
        return run
    left = replace(limits, session_hours=limits.session_hours - used_s / 3600)
    return replace(run, limits=left) if session_limit_s(left) > 0 else None


class Children(StopRequest):
    """Runs child processes one after another. Each signal tells the current one to save and end: by
    SIGTERM also for Ctrl-C, which a terminal sends to the child itself, where a second one would
    give up the save."""

    def __init__(self) -> None:
        super().__init__()
        self._child: subprocess.Popen | None = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == HANGUP:
            self._leave_terminal()
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    def run(self, words: Sequence[str]) -> int:
        """Exit code of a command; that of a signal which came before it was done."""
        self._child = subprocess.Popen(words, env=with_parent())
        if self.exit_code:  # came while it was started
            self._child.terminate()
        return self._child.wait() and (self.exit_code or self._child.returncode)


def _page(folder: str) -> str:
    """Place of the sweep's report; in the directory of a run, beside the run's own."""
    of_run = (mirror_folder(folder) / "run.toml").exists()
    return f"{folder}/{'sweep' if of_run else 'report'}.html"


def _compare(done: list[Member], out: str) -> None:
    from lmwright.core.param import count_params
    from lmwright.program.trainee import spec_of
    from lmwright.report.html import report_command
    from lmwright.report.read import read_run
    from lmwright.report.summary import summarize, tail_mean

    width = max(len(member.label) for member in done)
    print("\n" + LINE.format("run", "parameters", "train", "held out", "tokens/s", width=width))
    for member in done:
        record = read_run(member.run.dir)
        losses = [curves["loss"].values[-1] for curves in record.evals.values()]
        held_out = f"{sum(losses) / len(losses):.4f}" if losses else ""
        train = f"{tail_mean(record.train['loss']):.4f}" if "loss" in record.train else ""
        speed = summarize(record).get("tokens/s", "")
        count = f"{count_params(spec_of(member.run)):,}"
        print(LINE.format(member.label, count, train, held_out, speed, width=width))
    try:
        report_command([member.run.dir for member in done], out)
    except UserError as error:  # the runs themselves ended as the exit code says
        print(f"sweep: no report: {error}", file=sys.stderr)
