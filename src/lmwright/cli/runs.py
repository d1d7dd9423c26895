"""The verbs on runs: plan, train, sweep, report."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import OVERRIDES, REHEARSE, RUN, Rehearsed, given, load
from lmwright.errors import UserError


@click.command()
@RUN
@OVERRIDES
@click.option(
    "--on",
    metavar="MACHINE",
    help="v4-32, 2xv5e-256, gpu:h200x8, cpu, kaggle; `any` compares common machines.  "
    "[default: plan.on]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Estimate analytically, without the compiler (about two seconds).",
)
@click.option("--search", is_flag=True, help="Find the best mesh, remat, microbatches, optimizer.")
@click.option("--longest", is_flag=True, help="Find the longest rows that fit, for each option.")
@click.option(
    "--finalists",
    type=click.IntRange(min=1),
    help="Number of configurations that --search or --longest compile.  [default: 4]",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0),
    help="Also show how far a session of this length gets.  [default: limits.session_hours]",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    help="USD per chip-hour, for every machine.  [default: plan.prices, then list prices]",
)
@click.option("--measured", is_flag=True, help="Compare the run directory RUN with its prediction.")
@click.option(
    "--keep", is_flag=True, help="With --measured: correct later predictions for this machine."
)
@click.option("--forget", is_flag=True, help="With --measured: stop correcting them.")
@click.option("--json", is_flag=True, help="Print JSON instead of text.")
@click.option("--out", metavar="FOLDER", help="Also write plan.json and plan.html into FOLDER.")
def plan(run: str, overrides: Sequence[str], **options: Any) -> Any:
    """Predict memory, speed and cost on hardware you don't have.

    For TPU slices, the TPU's own compiler compiles the train step here; this needs the extra
    tpu, but no TPU, account or network. For GPUs, XLA's compiler gives the memory; this needs
    the extra cuda13 or cuda12. Times of GPUs, CPUs and --quick are analytic estimates.

    RUN may also be a preset, a Hugging Face folder or a GGUF file: then recipe pretrain, the
    model's own row length and the largest batch that fits are assumed, and the answer says so.

    \b
    Exit code: 0 the run fits, 1 it does not, 2 wrong input, 3 this host has too little memory
    for the compiler, 130 interrupted.

    \b
    Example:  lmwright plan run.toml --on v4-32
              lmwright plan run.toml train.remat=block --on v5e-8 --quick --hours 9
              lmwright plan run.toml --on v4-32 --search --finalists 2
              lmwright plan run.toml --on v6e-8 --longest --quick
              lmwright plan run.toml --on any --price 1.20
              lmwright plan llama-8b --on v5p-16 --quick
              lmwright plan --measured runs/mine
    """
    from lmwright.planner.command import Wanted, plan_named

    return plan_named(run, overrides, Wanted(**given(**options)))


@click.command(cls=Rehearsed)
@RUN
@OVERRIDES
@click.option("--pod", is_flag=True, help="Run as one of several hosts; JAX discovers the others.")
@REHEARSE
def train(run: str, overrides: Sequence[str], pod: bool, rehearse: str | None) -> Any:
    """Train a model, or resume an interrupted run.

    Prepares the data first if that takes only minutes; otherwise prints the command for it.

    Ctrl-C saves and says how to continue; a second one stops at once. On a TPU pod, start it
    on every host with --pod and one run directory that all of them see.

    \b
    Example:  lmwright train run.toml train.steps=2000
              lmwright train run.toml --rehearse go
    """
    from lmwright.train.signals import StopRequest

    with StopRequest() as stop:
        loaded = load(run, overrides)
        from lmwright.train.prepared import prepare_first

        loaded = prepare_first(loaded, lambda: load(run, overrides), pod=pod)
        from lmwright.train.command import train_command

        return train_command(loaded, stop=stop, **given(pod=pod or None, rehearse=rehearse))


@click.command()
@RUN
@OVERRIDES
@click.option("--dry-run", is_flag=True, help="Only list the runs.")
def sweep(run: str, overrides: Sequence[str], dry_run: bool) -> Any:
    """Train a small grid of runs and compare them in one report.

    The run file's [sweep.grid] and [[sweep.cases]] define the runs. Run it again to continue
    where it stopped.

    \b
    Example:  lmwright sweep run.toml --dry-run
    """
    from lmwright.train.sweep import sweep_command

    return sweep_command(run, overrides, dry_run=dry_run)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True)
@click.option(
    "-o",
    "--out",
    help="File, or - for the output; default: report.html or .md in the run directory; for "
    "several, here.",
)
@click.option("--markdown", is_flag=True, help="Write report.md: what ran where, cost, losses.")
@click.option("--watch", is_flag=True, help="Rewrite the page until the training is done.")
def report(run_dirs: Sequence[str], out: str | None, markdown: bool, watch: bool) -> None:
    """Write report.html for one run or several side by side.

    \b
    Example:  lmwright report quickstart/run
              lmwright report runs/a runs/b -o compare.html
              lmwright report runs/a --watch
              lmwright report runs/a --markdown
    """
    if watch and markdown:
        raise UserError("--watch: is for the page of curves; leave out --markdown")
    if watch and out == "-":
        raise UserError("--watch: writes a file anew, not the output; name one with -o FILE")
    if watch:
        from lmwright.report.watch import watch_command

        watch_command(run_dirs, out)
        return
    if markdown:
        from lmwright.report.markdown import markdown_command

        markdown_command(run_dirs, out)
        return
    from lmwright.report.html import report_command

    report_command(list(run_dirs), out)


VERBS = (plan, train, sweep)
