"""`podsmith plan`: compile a run for a slice that is not here, and say what comes of it."""

from pathlib import Path

from podsmith.plan.compile import compile_for, require_libtpu
from podsmith.plan.report import Report, write_report
from podsmith.plan.topology import parse_slice
from podsmith.run import Run

EXIT_DOES_NOT_FIT = 1


def plan_command(run: Run, on: str, out: str | None = None) -> int:
    """Prints the report and writes `<out>/plan.json` where a folder is named.

    Returns 0, or 1 where the run does not fit. Raises UserError for an unknown slice, a mesh
    that it cannot hold, or a missing compiler.
    """
    where = parse_slice(on)
    require_libtpu()
    print(f"compiling the train step for {where.name} (about a minute)", flush=True)
    report = Report(run, where, compile_for(run, where))
    print("\n".join(report.lines()))
    if out is not None:
        print(f"written: {write_report(report, Path(out))}")
    return 0 if report.compiled.fits else EXIT_DOES_NOT_FIT
