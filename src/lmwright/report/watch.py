"""report.html of runs that train, written anew while they do."""

import time
from collections.abc import Sequence
from pathlib import Path

from lmwright.errors import UserError
from lmwright.report.html import REPORT_FILE, read_runs, render
from lmwright.report.read import RunRecord
from lmwright.report.written import usual_file, write_page

EVERY_S = 30  # a run writes down its time as often


def watch_command(dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the page of curves every half minute until all runs are done or an interrupt, and
    returns its path on this machine. A browser that shows it loads it anew; the last one stays.

    Raises UserError as `write_report` does.
    """
    out = usual_file(dirs, REPORT_FILE) if out is None else out
    records = read_runs(dirs)
    path = write_page(render(records, reload_s=EVERY_S), out)
    print(f"report: {out}, written every {EVERY_S} s until the training is done; Ctrl-C ends it")
    try:
        while not all(map(_done, records)):
            time.sleep(EVERY_S)
            try:
                records = read_runs(dirs)
                write_page(render(records, reload_s=EVERY_S), out)
            except UserError as error:  # a bucket or a disk may be back next time
                print(f"report: {error}; trying again in {EVERY_S} s")
    except KeyboardInterrupt:
        pass
    write_page(render(records), out)
    return path


def _done(record: RunRecord) -> bool:
    return bool(record.sessions) and record.sessions[-1].get("end") == "done"
