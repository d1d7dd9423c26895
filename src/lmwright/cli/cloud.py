"""The verbs on jobs: launch, jobs."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import OVERRIDES, RUN, InOrder, given, load


@click.command()
@RUN
@OVERRIDES
@click.option("--on", required=True, help="Where; local:4x2 is four processes of two devices here.")
@click.option("--name", help="Name of the job. Default: the run's name and a number.")
@click.option("--detach", is_flag=True, help="Return at once; `lmwright jobs follow` takes it up.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option(
    "--hang-after",
    type=click.FloatRange(min=1),
    help="Least seconds without a step after which all ranks start again. Default: 60.",
)
@click.option(
    "--failures",
    type=click.IntRange(min=1),
    help="Failures without a new checkpoint after which the job is given up. Default: 5.",
)
def launch(run: str, overrides: Sequence[str], **options: Any) -> Any:
    """Train on several hosts and come back after faults.

    When a rank dies or hangs, all are ended and started again from the newest checkpoint.
    Ctrl-C leaves the job running.

    \b
    Example:  lmwright launch run.toml --on local:2x4
              lmwright launch run.toml --on local:4x2 --detach --name wiki
    """
    from lmwright.cloud.command import Wanted, launch_command

    return launch_command(load(run, overrides), run, overrides, Wanted(**given(**options)))


@click.group(cls=InOrder)
def jobs() -> None:
    """Look after launched jobs."""


@jobs.command("list")
def jobs_list() -> Any:
    """List all jobs of this machine.

    \b
    Example:  lmwright jobs list
    """
    from lmwright.cloud.command import list_command

    return list_command()


@jobs.command("show")
@click.argument("name")
def jobs_show(name: str) -> Any:
    """Show how the job NAME stands and what happened to it.

    \b
    Example:  lmwright jobs show wiki
    """
    from lmwright.cloud.command import show_command

    return show_command(name)


@jobs.command("logs")
@click.argument("name")
@click.option("--host", type=int, default=0, help="Number of the host. Default: 0.")
@click.option("-f", "--follow", "follow_it", is_flag=True, help="Go on until the job is over.")
def jobs_logs(name: str, host: int, follow_it: bool) -> Any:
    """Print the output of the job NAME on one host, all attempts.

    \b
    Example:  lmwright jobs logs wiki --host 2 -f
    """
    from lmwright.cloud.command import logs_command

    return logs_command(name, host, follow_it)


@jobs.command("follow")
@click.argument("name")
def jobs_follow(name: str) -> Any:
    """Supervise the job NAME from here, and print what happens.

    \b
    Example:  lmwright jobs follow wiki
    """
    from lmwright.cloud.command import follow_command

    return follow_command(name)


@jobs.command("start")
@click.argument("name")
@click.option("--detach", is_flag=True, help="Return at once.")
def jobs_start(name: str, detach: bool) -> Any:
    """Start the job NAME again.

    It failed or was stopped; it goes on from its newest checkpoint.

    \b
    Example:  lmwright jobs start wiki
    """
    from lmwright.cloud.command import start_command

    return start_command(name, detach=detach)


@jobs.command("stop")
@click.argument("name")
def jobs_stop(name: str) -> Any:
    """Let the job NAME save, and end it.

    \b
    Example:  lmwright jobs stop wiki
    """
    from lmwright.cloud.command import stop_command

    return stop_command(name)


@jobs.command("forget")
@click.argument("name")
@click.option("--kill", is_flag=True, help="End it first, without saving.")
def jobs_forget(name: str, kill: bool) -> Any:
    """Remove what is kept of the job NAME; its run directory stays.

    \b
    Example:  lmwright jobs forget wiki
    """
    from lmwright.cloud.command import forget_command

    return forget_command(name, kill=kill)


VERBS = (launch, jobs)
