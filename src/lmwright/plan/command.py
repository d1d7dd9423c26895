"""`lmwright plan`: what comes of a run on machines that are not here."""

from dataclasses import dataclass
from pathlib import Path

from lmwright.errors import UserError
from lmwright.plan.compile import compile_for, require_libtpu
from lmwright.plan.length import with_steps
from lmwright.plan.machine import Machine, machine_of, parse_machine
from lmwright.plan.quick import Quick
from lmwright.plan.report import Report, write_plan
from lmwright.plan.takes import Takes, takes
from lmwright.plan.topology import Slice, parse_slice
from lmwright.run import Run

EXIT_DOES_NOT_FIT = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `lmwright plan`."""

    on: str
    """A machine, or `any`."""
    out: str | None = None
    """Folder of plan.json."""
    quick: bool = False
    """The analytic answer."""
    search: bool = False
    finalists: int | None = None
    """Candidates of the search that the compiler sees."""
    price: float | None = None
    """USD per chip-hour."""
    hours: float | None = None
    """Length of one session."""


def plan_command(run: Run, wanted: Wanted) -> int:
    """Prints the report and writes `<out>/plan.json` where a folder is named.

    Returns 0, or 1 where the run does not fit. Raises UserError for an unknown machine, a mesh
    that it cannot hold, a missing compiler, or options that do not go together.
    """
    if wanted.finalists is not None and (wanted.quick or not wanted.search):
        raise UserError("--finalists: only a --search without --quick has any; drop it")
    run = with_steps(run)
    if wanted.on.strip().lower() == "any":
        return _any(run, wanted)
    machine = parse_machine(wanted.on)
    if wanted.finalists is not None and machine.platform != "tpu":
        raise UserError(f"--finalists: there is no compiler for {machine.name} here; drop it")
    if wanted.search:
        return _search(run, machine, wanted)
    if wanted.quick or machine.platform != "tpu":
        return _quick(run, machine, wanted)
    return _compiled(run, parse_slice(wanted.on), wanted)


def _any(run: Run, wanted: Wanted) -> int:
    from lmwright.plan.compare import compare, compare_json, compare_lines

    if wanted.search:
        raise UserError("--on any: each machine is searched already; drop --search")
    if wanted.price is not None:
        raise UserError("--price: machines differ; set plan.prices.v5e=1.10 and the like instead")
    choices = compare(run, hours=wanted.hours)
    print("\n".join(compare_lines(run, choices)))
    _write(compare_json(choices), wanted)
    return 0 if any(choice.fits for choice in choices) else EXIT_DOES_NOT_FIT


def _search(run: Run, machine: Machine, wanted: Wanted) -> int:
    from lmwright.plan.cures import larger_lines
    from lmwright.plan.search import FINALISTS, Search

    found, stopped = Search.of(run, machine), False
    if machine.platform == "tpu" and not wanted.quick:
        try:
            found.compile_finalists(parse_slice(wanted.on), wanted.finalists or FINALISTS)
        except KeyboardInterrupt:
            stopped = True
            print("\ninterrupted; this is what is known so far", flush=True)
    print("\n".join(found.lines()))
    best = found.ranked()[0]
    if best.fits:
        tokens = best.candidate.quick.plan.tokens_per_step
        print("\n".join(["", *_takes(run, machine, best.step_s, tokens, wanted).lines()]))
    else:
        print("\n".join(larger_lines(run, machine, wanted.hours)))
    _write(found.to_json(), wanted)
    if stopped:
        return EXIT_INTERRUPTED
    return 0 if best.fits else EXIT_DOES_NOT_FIT


def _quick(run: Run, machine: Machine, wanted: Wanted) -> int:
    from lmwright.plan.cures import cure_lines

    found = Quick.of(run, machine)
    cost = _takes(run, machine, found.step_s, found.plan.tokens_per_step, wanted)
    print("\n".join(found.lines(cost)))
    if not found.fits:
        print("\n".join(cure_lines(run, machine, wanted.hours)))
    _write(found.to_json(cost), wanted)
    return 0 if found.fits else EXIT_DOES_NOT_FIT


def _compiled(run: Run, where: Slice, wanted: Wanted) -> int:
    from lmwright.plan.cures import cure_lines

    require_libtpu()
    print(f"compiling the train step for {where.name} (about a minute)", flush=True)
    report = Report(run, where, compile_for(run, where))
    found, cost = report.compiled, None
    if report.estimate is not None:
        step_s = report.estimate.step_s
        cost = _takes(run, machine_of(where), step_s, found.tokens_per_step, wanted)
    print("\n".join(report.lines(cost)))
    if not found.fits:
        print("\n".join(cure_lines(run, machine_of(where), wanted.hours)))
    _write(report.to_json(cost), wanted)
    return 0 if found.fits else EXIT_DOES_NOT_FIT


def _takes(
    run: Run, machine: Machine, step_s: float, tokens_per_step: int, wanted: Wanted
) -> Takes:
    return takes(run, machine, step_s, tokens_per_step, price=wanted.price, hours=wanted.hours)


def _write(text: str, wanted: Wanted) -> None:
    if wanted.out is not None:
        print(f"written: {write_plan(text, Path(wanted.out))}")
