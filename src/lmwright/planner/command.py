"""`lmwright plan`: predicts memory, time and cost of a run on another machine.

machine, run --> the compiler, or arithmetic --> Answer: lines, JSON, exit code
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lmwright.config.run import Run
from lmwright.config.text import parse_override
from lmwright.data.manifest import MANIFEST
from lmwright.data.portions import PORTIONS
from lmwright.errors import UserError, install
from lmwright.formats.open import is_run, load_run
from lmwright.hardware.slices import Slice, parse_slice
from lmwright.planner.advice import bound_of
from lmwright.planner.analytic.machine import Machine, known_as, machine_of, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.remat import settled
from lmwright.planner.answer import Answer, Wanted
from lmwright.planner.checklist import known_now
from lmwright.planner.compiler.compile import (
    Compiled,
    HostMemoryError,
    compile_for,
    has_libtpu,
)
from lmwright.planner.compiler.gpu import has_cuda_compiler
from lmwright.planner.cost import RunCost, cost_of
from lmwright.planner.later import Later, later_of, mean_step_s, with_later
from lmwright.planner.packed import with_documents
from lmwright.planner.page import write_page
from lmwright.planner.phases import Phase, phases_of
from lmwright.planner.remedy import advise, too_large
from lmwright.planner.report import Report, write_plan
from lmwright.planner.subject import subject
from lmwright.planner.suggestions import larger_way, suggest
from lmwright.program.length import completed, with_steps
from lmwright.storage.bucket import is_bucket

FINALISTS = 4
ASSUMED_STEPS = 1000  # where they are not known
INTERRUPTED = ("interrupted; these are the results so far", "")
EXIT_HOST_MEMORY = 3


def plan_named(name: str, overrides: Sequence[str], wanted: Wanted) -> int:
    """`plan_command` for a run file, a run directory, or a model alone, by its name."""
    if wanted.measured:
        return _measured(name, overrides, wanted)
    if wanted.keep or wanted.forget:
        raise UserError(
            f"--{'keep' if wanted.keep else 'forget'}: only works with --measured; add it"
        )
    return plan_command(*found_for(name, overrides, wanted))


def found_for(
    source: Run | str, overrides: Sequence[str], wanted: Wanted
) -> tuple[Run, Wanted, list[str]]:
    """The run of a name, what is wanted with its machine, and lines about what was chosen for it.
    Raises UserError where no machine is named."""
    if wanted.on is None and (isinstance(source, Run) or is_run(source)):
        run = source if isinstance(source, Run) else load_run(source, overrides)
        wanted = replace(wanted, on=run.plan.on)
    elif wanted.on is None:  # a model alone
        given = dict(map(parse_override, overrides))
        wanted = replace(wanted, on=given.get(("plan", "on")))
    if wanted.on is None:
        raise UserError(
            "--on: missing; name a machine, as in --on v4-32, or --on any, or set plan.on"
        )
    if isinstance(source, Run):
        return source, wanted, []
    found, notes = subject(source, overrides, wanted.on)
    return found, wanted, notes


def _measured(name: str, overrides: Sequence[str], wanted: Wanted) -> int:
    from lmwright.planner import own_machine
    from lmwright.planner.measured import Comparison, machine_of_run
    from lmwright.report.read import read_run

    clash = {"--search": wanted.search, "--longest": wanted.longest}
    clash |= {"--keep and --forget": wanted.keep and wanted.forget}
    if other := next((name for name, value in clash.items() if value), None):
        raise UserError(f"--measured: cannot be combined with {other}; remove one")
    if wanted.forget:
        machine = parse_machine(wanted.on or machine_of_run(read_run(name))).name
        there = own_machine.forget(machine)
        print(f"{machine}: {'removed' if there else 'nothing was stored'}")
        return 0
    sides = Comparison.of(name, wanted.on, tuple(overrides), wanted.quick)
    if wanted.keep:
        value = {sides.predicted.by: sides.factor}
        path = own_machine.keep(sides.machine.name, name, **value)
        note = (
            f"kept in {path}: predictions for {sides.machine.name} are multiplied by "
            f"{sides.factor:.3g} from now on; --forget removes that"
        )
        print(note, file=sys.stderr)
    _show(sides.lines(), sides.to_json(), wanted)
    return 0


def plan_command(run: Run, wanted: Wanted, notes: Sequence[str] = ()) -> int:
    """Prints the report below `notes`, and writes `<out>/plan.json` where a folder is named.

    Returns 0, 1 where the run does not fit, or 3 where this host has too little memory for the
    compiler. Raises UserError as `answer_of` does.
    """
    try:
        answer = answer_of(run, wanted, notes)
    except HostMemoryError as error:
        print(f"lmwright: error: {error}", file=sys.stderr)
        return EXIT_HOST_MEMORY
    if answer.notes:
        where = sys.stderr if wanted.json else sys.stdout
        print("\n".join(answer.notes), end="\n\n", file=where)
    _show(answer.lines, answer.json, wanted)
    _write_page(run, answer, wanted)
    return answer.code


def answer_of(run: Run, wanted: Wanted, notes: Sequence[str] = ()) -> Answer:
    """The prediction for a run, below `notes`. Raises UserError for an unknown machine, a mesh that
    it cannot hold, or options that do not go together."""
    assert wanted.on is not None
    _refuse(wanted)
    alias = known_as(wanted.on)
    if alias is not None:
        hours = run.limits.session_hours if wanted.hours is None else wanted.hours
        own = alias.hours if hours is None else min(hours, alias.hours)
        wanted, notes = replace(wanted, on=alias.name, hours=own), [*notes, alias.note]
        if hours is not None and hours > own:
            notes.append(f"a session there ends after {own:g} hours, so that the {hours:g} that "
                         f"are asked for are counted as sessions of {own:g}")  # fmt: skip
    if run.train.epochs is not None and not is_bucket(run.data.dir) and not _is_prepared(run):
        notes = [*notes, f"train.epochs: nothing is prepared in {run.data.dir}, which counts the "
                         f"steps; hours and cost are those of {ASSUMED_STEPS:,} steps"]  # fmt: skip
        run = replace(run, train=replace(run.train, steps=ASSUMED_STEPS, epochs=None))
    # no plan needs the ids of a tokenizer, and a bucket may be out of reach
    run = with_steps(run) if is_bucket(run.data.dir) else completed(run)
    return replace(_answer(run, wanted), notes=notes)


def _is_prepared(run: Run) -> bool:
    return any((Path(run.data.dir) / name).exists() for name in (f"pack/{MANIFEST}", PORTIONS))


def _write_page(run: Run, answer: Answer, wanted: Wanted) -> None:
    if wanted.out is None:
        return
    chart = answer.report.chart() if answer.report else None
    title = f"{run.name} on {wanted.on}"
    page = write_page(Path(wanted.out), title, answer.lines, answer.tensors, chart)
    print(f"written: {page}", file=sys.stderr if wanted.json else sys.stdout)


def _refuse(wanted: Wanted) -> None:
    """Raises UserError for options that have no effect together."""
    if wanted.finalists is not None and (wanted.quick or not (wanted.search or wanted.longest)):
        raise UserError(
            "--finalists: only applies to --search or --longest without --quick; remove it"
        )
    if wanted.out is not None and Path(wanted.out).exists() and not Path(wanted.out).is_dir():
        raise UserError(f"--out {wanted.out}: is not a folder; name another")
    if not wanted.longest:
        return
    others = {"--search": wanted.search, "--hours": wanted.hours, "--price": wanted.price}
    for name, value in others.items():
        if value not in (False, None):
            raise UserError(f"--longest: cannot be combined with {name}; remove one")
    if wanted.on.strip().lower() == "any":
        raise UserError("--longest: needs one machine; replace --on any")


def _show(lines: Sequence[str], text: str, wanted: Wanted) -> None:
    """Prints the lines, or the JSON `text` that goes to plan.json as well."""
    print(text if wanted.json else "\n".join(lines))
    if wanted.out is not None:
        path = write_plan(text, Path(wanted.out))
        print(f"written: {path}", file=sys.stderr if wanted.json else sys.stdout)


def _answer(run: Run, wanted: Wanted) -> Answer:
    if wanted.on.strip().lower() == "any":
        return _any(run, wanted)
    machine = parse_machine(wanted.on)
    known = with_documents(run, machine)
    if wanted.search:  # which tells of each way with its policy
        return _on(run, known, wanted)
    choice = settled(run, machine)  # as `train` chooses, which looks at no rows
    answer = _on(choice.run, known, wanted)
    return answer if not choice.note else replace(answer, lines=[choice.note, *answer.lines])


def _on(run: Run, machine: Machine, wanted: Wanted) -> Answer:
    asks = {"tpu": True, "gpu": has_cuda_compiler(), "cpu": False}[machine.platform]
    if wanted.finalists is not None and not asks:
        raise UserError(f"--finalists: no candidate is compiled for {machine.name}; remove it")
    if wanted.quick or machine.platform == "cpu":
        return _estimated(run, machine, wanted)
    if machine.platform == "gpu":
        if asks and wanted.search:
            return _search(run, machine, wanted, machine)
        if asks and wanted.longest:
            return _longest(run, machine, wanted, machine)
        if asks:
            return _compiled_for_gpus(run, machine, wanted)
        return _without(_estimated(run, machine, wanted), "CUDA", "memory of --quick", "cuda13")
    if not has_libtpu():
        return _without(_estimated(run, machine, wanted), "TPU", "estimate of --quick", "tpu")
    where = parse_slice(wanted.on)
    if wanted.search:
        return _search(run, machine, wanted, where)
    if wanted.longest:
        return _longest(run, machine, wanted, where)
    return _compiled(run, where, wanted)


def _without(answer: Answer, compiler: str, instead: str, extra: str) -> Answer:
    """The answer of arithmetic, where a compiler is not installed."""
    device = "TPU" if compiler == "TPU" else "GPU"
    line = (
        f"the {compiler} compiler is not installed, so this is the {instead}; for the compiler's "
        f"own answer {install(extra)} (no {device} is needed)"
    )
    return replace(answer, lines=[*answer.lines, line])


def _estimated(run: Run, machine: Machine, wanted: Wanted) -> Answer:
    """The answer without a compiler."""
    if wanted.search:
        return _search(run, machine, wanted, None)
    if wanted.longest:
        return _longest(run, machine, wanted, None)
    return _quick(run, machine, wanted)


def _any(run: Run, wanted: Wanted) -> Answer:
    from lmwright.planner.compare import compare, compare_json, compare_lines

    if wanted.search:
        raise UserError("--on any: already searches each machine; remove --search")
    choices = compare(run, hours=wanted.hours, price=wanted.price)
    lines, best = compare_lines(run, choices), choices[0]
    if best.fits:
        took = best.best.quick.timing
        lines += ["", f"{best.name} is {bound_of(took.by_kind, took.by_part).text}"]
    return Answer(lines, compare_json(choices), best.fits)


def _search(run: Run, machine: Machine, wanted: Wanted, where: Slice | Machine | None) -> Answer:
    from lmwright.planner.search import Search

    search = Search.of(run, machine)
    stopped = where is not None and _is_stopped(search.ask, where, wanted)
    best = search.ranked()[0]
    run = best.candidate.given
    lines = [*(INTERRUPTED if stopped else ()), *search.lines()]
    if best.fits:
        tokens = best.candidate.quick.plan.tokens_per_step
        try:
            mean_s = mean_step_s(best.step_s, later_of(best.candidate.run, machine))
            lines += ["", *_takes(best.candidate.run, machine, mean_s, tokens, wanted).lines()]
        except UserError as error:  # rows that are left when an adapter has ended
            lines += ["", str(error)]
        lines += ["", f"the best way is {bound_of(best.by_kind, best.by_part).text}"]
    else:
        lines += larger_way(run, machine, wanted.hours)[1]
    return Answer(lines, search.to_json(), best.fits, stopped)


def _is_stopped(ask: Callable[..., None], where: Slice | Machine, wanted: Wanted) -> bool:
    """Asks the compiler about the best candidates; True if Ctrl-C ended that, and what is known by
    then is the answer."""
    try:
        ask(where, wanted.finalists or FINALISTS)
    except KeyboardInterrupt:
        return True
    return False


def _longest(run: Run, machine: Machine, wanted: Wanted, where: Slice | Machine | None) -> Answer:
    from lmwright.planner.longest import Longest

    longest = Longest.of(run, machine)
    stopped = where is not None and _is_stopped(longest.ask, where, wanted)
    lines = [*(INTERRUPTED if stopped else ()), *longest.lines()]
    if where is None:
        lines += ["", "by the analytic model; no compiler was asked"]
    return Answer(lines, longest.to_json(), longest.fits, stopped)


def _compiled_for_gpus(run: Run, machine: Machine, wanted: Wanted) -> Answer:
    """The answer of arithmetic with the compiler's memory: its programs for GPUs say no times."""
    print(f"compiling the train step for {machine.name} (some minutes)", file=sys.stderr)
    return _quick(run, machine, wanted, compile_for(run, machine))


def _quick(run: Run, machine: Machine, wanted: Wanted, compiled: Compiled | None = None) -> Answer:
    quick = Quick.of(run, machine, compiled)
    later = later_of(run, machine)
    step_s = mean_step_s(quick.step_s, later)
    cost = _takes(run, machine, step_s, quick.plan.tokens_per_step, wanted)
    lines = [*quick.lines(cost), *(phase.line() for phase in later)]
    if quick.fits:
        last = advise(quick, quick.timing.by_kind, quick.timing.by_part)
    else:
        over_bytes = quick.over_bytes if compiled else 0.0
        suggestions = suggest(run, machine, wanted.hours, over_bytes)
        last = too_large(quick.parts, quick.limit_bytes, quick, suggestions.best)
        lines += suggestions.lines
    known_s = quick.step_s if quick.fits else None
    known = known_now(quick.plan, quick.peak_bytes, quick.limit_bytes, known_s, quick.fits)
    text = with_later(quick.to_json(cost, last), later)
    lines = [*lines, "", *known, "", last.text]
    return Answer(lines, text, quick.fits, tensors=quick.tensors)


def _compiled(run: Run, where: Slice, wanted: Wanted) -> Answer:
    long = "a minute; more for many kinds of layers"
    print(f"compiling the train step for {where.name} ({long})", file=sys.stderr)
    report = Report(run, where, compile_for(run, where))
    compiled, machine = report.compiled, machine_of(where)
    quick = Quick.of(run, machine)
    took = report.estimate
    if took is not None:
        later = [_remaining(run, where, phase) for phase in phases_of(run)[1:]]
        mean_s = mean_step_s(took.step_s, later)
        cost = _takes(run, machine, mean_s, compiled.tokens_per_step, wanted)
        last = advise(quick, took.by_kind, took.parts)
        lines = [*report.lines(cost), *(phase.line() for phase in later)]
        fits = report.fits and all(phase.fits for phase in later)
        known = known_now(quick.plan, compiled.peak_bytes, report.limit_bytes, mean_s, fits)
        lines += ["", *known, "", last.text]
        text = with_later(report.to_json(cost, last), later)
        return Answer(lines, text, fits, tensors=report.tensors, report=report)
    cost = _takes(run, machine, quick.step_s, compiled.tokens_per_step, wanted)
    over_bytes = compiled.peak_bytes - report.limit_bytes
    suggestions = suggest(run, machine, wanted.hours, over_bytes)
    last = too_large(report.parts, report.limit_bytes, quick, suggestions.best)
    known = known_now(quick.plan, compiled.peak_bytes, report.limit_bytes, None, fits=False)
    lines = [*report.lines(), "", *quick.would_take(cost), *suggestions.lines, "", *known]
    lines += ["", last.text]
    text = report.to_json(cost, last)
    return Answer(lines, text, report.fits, tensors=report.tensors, report=report)


def _remaining(run: Run, where: Slice, phase: Phase) -> Later:
    names = [t.name for t in phase.active]
    print(f"compiling the step that remains from step {phase.start:,} on", file=sys.stderr)
    report = Report(run, where, compile_for(run, where, trainees=names))
    step_s = report.estimate.step_s if report.estimate else None
    return Later(phase, report.compiled.peak_bytes, step_s, report.fits)


def _takes(
    run: Run, machine: Machine, step_s: float, tokens_per_step: int, wanted: Wanted
) -> RunCost:
    return cost_of(run, machine, step_s, tokens_per_step, price=wanted.price, hours=wanted.hours)
