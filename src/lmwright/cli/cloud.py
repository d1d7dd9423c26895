"""The verbs on jobs: launch, jobs."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import OVERRIDES, REHEARSE, InOrder, given, load, with_word

ABOVE_0 = click.FloatRange(min=0, min_open=True)
WORDS = "lmwright.words"  # after `--`
VERBS_OF_JOBS = ("train", "eval", "export", "prepare")


class WithCommand(click.Command):
    """Command that keeps what comes after `--` apart."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[WORDS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, with_word(args[:at]))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command(cls=WithCommand)
@click.argument("run", metavar="RUN", required=False)
@OVERRIDES
@click.option(
    "--on",
    help="Slices to try, as in v4-32,v5e-64; or kaggle, ssh:hosts.txt, gke:CLUSTER, local:4x2.",
)
@click.option("--slice", help="Slices of gke:CLUSTER to try, as in 7x-16 or 2xv5p-32.")
@click.option("--do", "verb", type=click.Choice(VERBS_OF_JOBS), help="Default: train.")
@click.option("--name", help="Name of the job. Default: the run's name and a number.")
@click.option("--detach", is_flag=True, help="Return at once; see `lmwright jobs follow`.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@REHEARSE
@click.option(
    "--hang-after",
    type=click.FloatRange(min=1),
    help="Restart all ranks after this many seconds without a step, at least. Default: 60.",
)
@click.option(
    "--failures",
    type=click.IntRange(min=1),
    help="Give up after this many failures without a new checkpoint. Default: 5.",
)
@click.option("--bucket", help="Folder for jobs; default: gs://BUCKET/lmwright beside the run.")
@click.option("--project", help="Google Cloud project.")
@click.option("--zone", help="Zone, as in us-central2-b; or several with commas, tried in turn.")
@click.option("--spot", "capacity", flag_value="spot", help="Cheaper; can be preempted.")
@click.option("--on-demand", "capacity", flag_value="on-demand", help="The default.")
@click.option("--guaranteed", "capacity", flag_value="guaranteed", help="Guaranteed capacity.")
@click.option("--reservation", help="Name of a reservation.")
@click.option("--service-account", help="E-mail address of the hosts' service account.")
@click.option("--network", help="Network of the hosts.")
@click.option("--subnetwork", help="Subnetwork of the hosts.")
@click.option(
    "--internal-ips", is_flag=True, default=None, help="Give hosts internal addresses only."
)
@click.option("--disk", "disks", multiple=True, help="Disk that every host mounts read-only.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    help="VARIABLE=NAME, of Secret Manager; on gke: VARIABLE=SECRET/KEY.",
)
@click.option("--valid-hours", type=ABOVE_0, help="Longest wait in the queue, in hours.")
@click.option("--max-hours", type=ABOVE_0, help="End the job after this many hours on slices.")
@click.option("--max-chip-hours", type=ABOVE_0, help="End the job after this many chip-hours.")
@click.option("--max-cost", type=ABOVE_0, help="End the job at this list price, in USD.")
@click.option("--namespace", help="Namespace of the pods of gke:. Default: default.")
@click.option("--image", help="Image of the containers of gke:. Default: python:3.12-slim.")
@click.option("--pod-account", help="Kubernetes service account of the pods of gke:.")
@click.option("--queue", help="Local queue of Kueue, for gke:.")
@click.option("--label", "labels", multiple=True, help="KEY=VALUE, for the pods of gke:.")
@click.option("--remote-python", help="Python with lmwright installed, on the hosts of ssh:.")
@click.option("--notebook", metavar="FILE", help="Write a notebook for Kaggle or Colab instead.")
def launch(run: str | None, overrides: Sequence[str], **options: Any) -> Any:
    """Train on several hosts and recover from faults.

    When a rank dies or hangs, all ranks restart from the newest checkpoint. A slice that was
    preempted is requested again. Ctrl-C leaves the job running. --do runs another verb on a target
    of one host, with the words after `--`. Without it, COMMAND runs on all hosts.

    \b
    Example:  lmwright launch run.toml --on local:2x4
              lmwright launch run.toml --on v4-32 --zone us-central2-b --spot --dry-run
              lmwright launch run.toml --on v4-32 --zone us-central2-b --rehearse go
              lmwright launch run.toml --on gke:my-cluster --slice 7x-16
              lmwright launch run.toml --on kaggle
              lmwright launch run.toml --on v5e-8 --do eval -- --max-rows 1000
    """
    from lmwright.cloud.command import launch_command, wanted_with
    from lmwright.cloud.work import work_of

    words = click.get_current_context().meta[WORDS]
    work = work_of(options.pop("verb"), words, options.pop("rehearse"))
    if run is None and work.verb:
        raise click.UsageError("Missing argument 'RUN'.", click.get_current_context())
    wanted = wanted_with(work, **given(**options))
    loaded = load(run, overrides) if run else None
    return launch_command(loaded, run or "", overrides, wanted)


@click.group(cls=InOrder)
def jobs() -> None:
    """Manage launched jobs."""


@jobs.command("list")
def jobs_list() -> Any:
    """List all jobs of this machine.

    \b
    Example:  lmwright jobs list
    """
    from lmwright.cloud.jobs import list_command

    return list_command()


@jobs.command("show")
@click.argument("name")
def jobs_show(name: str) -> Any:
    """Show status and events of the job NAME.

    \b
    Example:  lmwright jobs show wiki
    """
    from lmwright.cloud.jobs import show_command

    return show_command(name)


@jobs.command("logs")
@click.argument("name")
@click.option("--host", type=int, default=0, help="Number of the host. Default: 0.")
@click.option("-f", "--follow", "follow_it", is_flag=True, help="Keep printing until the job ends.")
def jobs_logs(name: str, host: int, follow_it: bool) -> Any:
    """Print the output of the job NAME on one host, all attempts.

    \b
    Example:  lmwright jobs logs wiki --host 2 -f
    """
    from lmwright.cloud.jobs import logs_command

    return logs_command(name, host, follow_it)


@jobs.command("follow")
@click.argument("name")
@click.option("--on-vm", is_flag=True, help="Let a small VM of Google Cloud supervise it instead.")
@click.option("--zone", default="", help="Of that VM. Default: the zone of the slice.")
@click.option("--machine-type", default="", help="Of that VM. Default: e2-micro.")
@click.option("--dry-run", is_flag=True, help="Print the requests for that VM.")
def jobs_follow(name: str, on_vm: bool, zone: str, machine_type: str, dry_run: bool) -> Any:
    """Supervise the job NAME from here, and print what happens.

    With --on-vm, a VM supervises the job, and deletes itself when the job is over.

    \b
    Example:  lmwright jobs follow wiki
              lmwright jobs follow wiki --on-vm
    """
    from lmwright.cloud.jobs import follow_command, keep_command

    if on_vm:
        return keep_command(name, zone, machine_type, dry_run=dry_run)
    if zone or machine_type or dry_run:
        raise click.UsageError("--zone, --machine-type and --dry-run are for --on-vm.")
    return follow_command(name)


@jobs.command("start")
@click.argument("name")
@click.option("--detach", is_flag=True, help="Return at once.")
def jobs_start(name: str, detach: bool) -> Any:
    """Start the job NAME again.

    A job that failed or was stopped continues from its newest checkpoint.

    \b
    Example:  lmwright jobs start wiki
    """
    from lmwright.cloud.jobs import start_command

    return start_command(name, detach=detach)


@jobs.command("stop")
@click.argument("name")
def jobs_stop(name: str) -> Any:
    """Stop the job NAME after it has saved.

    \b
    Example:  lmwright jobs stop wiki
    """
    from lmwright.cloud.jobs import stop_command

    return stop_command(name)


@jobs.command("ssh", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", type=int, default=0, help="Number of the host. Default: 0.")
@click.option("--tunnel", metavar="PORT", help="Lead this port here to that port of the host.")
def jobs_ssh(name: str, command: Sequence[str], host: int, tunnel: str | None) -> Any:
    """Open a shell on a host of the job NAME, or run COMMAND there.

    With --tunnel, a program here such as a browser reaches a notebook that runs on the host.
    PORT:OTHER leads to another port there.

    \b
    Example:  lmwright jobs ssh wiki --host 2
              lmwright jobs ssh wiki --tunnel 8888
    """
    from lmwright.cloud.jobs import ssh_command

    return ssh_command(name, host, command, tunnel)


@jobs.command("forget")
@click.argument("name")
@click.option("--kill", is_flag=True, help="Kill it first, without saving.")
def jobs_forget(name: str, kill: bool) -> Any:
    """Delete the record of the job NAME; its run directory stays.

    \b
    Example:  lmwright jobs forget wiki
    """
    from lmwright.cloud.jobs import forget_command

    return forget_command(name, kill=kill)


@click.group(cls=InOrder)
def cloud() -> None:
    """Set up Google Cloud for launching."""


@cloud.command("init")
@click.option("--project", required=True, help="Google Cloud project.")
@click.option("--zone", required=True, help="Zone of the slices, as in us-central2-b.")
@click.option("--bucket", required=True, help="Bucket for runs and jobs, as gs://NAME.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
def cloud_init(project: str, zone: str, bucket: str, yes: bool, dry_run: bool) -> Any:
    """Create the Google Cloud resources for TPU slices.

    Enables APIs, creates a bucket and a service account, and writes the settings.

    \b
    Example:  lmwright cloud init --project my-project --zone us-central2-b --bucket gs://my-runs
    """
    from lmwright.cloud.init import init_command

    def agree() -> bool:
        return yes or click.confirm("Do this?")

    return init_command(project, zone, bucket, agree, dry_run=dry_run)


VERBS = (launch, jobs, cloud)
