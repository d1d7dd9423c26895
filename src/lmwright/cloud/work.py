"""Work: what the ranks of a job run.

    launch RUN                            lmwright train, on all hosts
    launch RUN --do eval -- --max-rows 9  another verb, on one host
    launch -- COMMAND                     any command, on all hosts

What comes after `--` goes to the verb, or is the command. Only `train` says by heartbeats that it
is alive; of everything else it is known whether it has ended, and how.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lmwright.cloud.spec import PROGRAM, Limits
from lmwright.cloud.vault import refuse_plain_secrets
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.storage.bucket import is_bucket
from lmwright.storage.kaggle import is_kaggle_name

TRAIN = "train"
OF_RUN_FILE = (TRAIN, "prepare")
"""The others take the run directory."""
ANY_TIME_S = 1e9
READY_S = 300.0  # to look around, before anything is read
SLOW_BYTES_PER_S = 50e6  # a tenth of what a host reads from a bucket of its region
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """A verb of lmwright, or a command."""

    verb: str = TRAIN
    words: tuple[str, ...] = ()
    """Arguments of the verb, or the command."""

    @property
    def rehearses(self) -> bool:
        """True if a rehearsal comes first."""
        return self.trains and any(word.startswith("--rehearse=") for word in self.words)

    @property
    def trains(self) -> bool:
        return self.verb == TRAIN

    def command(self, run_file: Sequence[str], run_dir: str) -> tuple[str, ...]:
        """Command of a rank. `run_file` is the run, with its overrides."""
        if not self.verb:
            return self.words
        of = run_file if self.verb in OF_RUN_FILE else (run_dir,)
        return (PROGRAM, self.verb, *of, *self.words)

    def limits(self, limits: Limits) -> Limits:
        """The limits of a job that does this."""
        return limits if self.trains else replace(limits, start_s=ANY_TIME_S)


def work_of(verb: str, words: Sequence[str], rehearse: str | None = None) -> Work:
    """The work that `--do VERB`, `-- WORDS` and `--rehearse` ask for. Raises UserError for words
    with secrets, and for a rehearsal of what does not train."""
    refuse_plain_secrets(words)
    work = Work(verb=verb or ("" if words else TRAIN), words=tuple(words))
    if rehearse is None:
        return work
    if not work.trains:
        raise UserError("--rehearse: only training is rehearsed; leave it out, or --do and --")
    return replace(work, words=(*words, f"--rehearse={rehearse}"))


def refuse_rehearsal(work: Work, target: str) -> None:
    """UserError for a rehearsal on a target whose sessions have their own command."""
    if work.rehearses:
        raise UserError(
            f"--rehearse: cannot be launched with {target}; in a notebook there, run lmwright "
            "train RUN --rehearse"
        )


def refuse_smaller(run: Run, offers: Mapping[str, int]) -> None:
    """Raises UserError if a slice of a rehearsal has fewer devices than `plan.on`; `offers` maps
    names of slices to their numbers of devices."""
    from lmwright.planner.analytic.machine import parse_machine

    if run.plan.on is None:
        return
    machine = parse_machine(run.plan.on)
    for name, devices in offers.items():
        if devices < machine.num_devices:
            raise UserError(
                f"--rehearse: {name} has {devices} devices, and plan.on = {run.plan.on!r} has "
                f"{machine.num_devices}; launch on that, or set plan.on to what is used"
            )


def limits_by_size(limits: Limits, run: Run) -> Limits:
    """The limits of a run whose weights and checkpoints come from a bucket, a hub or a disk.

    A host reads at most the whole state, and at `SLOW_BYTES_PER_S` or faster.
    """
    from lmwright.core.param import count_params
    from lmwright.planner.cost import checkpoint_bytes
    from lmwright.program.trainee import spec_of

    size = max(checkpoint_bytes(run), FP32_BYTES * count_params(spec_of(run)))
    reading = size / SLOW_BYTES_PER_S
    return replace(limits, restore_s=READY_S + reading, beside_s=limits.beside_s + reading)


def refuse_several_hosts(work: Work, hosts: int, target: str) -> None:
    """Raises UserError for a verb that knows one host only."""
    if work.verb and not work.trains and hosts > 1:
        raise UserError(
            f"--do: {work.verb} runs on one host, and {target} has {hosts}; choose a target of one "
            "host, as v5e-8, v4-8 or local:1x4"
        )


def refuse_local_sources(run: Run) -> None:
    """Raises UserError for text that the host of a slice cannot read."""
    for place, source in enumerate(run.data.sources):
        if is_kaggle_name(source.path):
            raise UserError(
                f"data.sources.{place}.path: {source.path}: the host of a slice has neither "
                "Kaggle's client nor your token; prepare here and push the data"
            )
        if "://" not in source.path:
            raise UserError(
                f"data.sources.{place}.path: {source.path}: the host of a slice cannot see it; "
                "copy it to a bucket and write gs://BUCKET/..."
            )
    if not is_bucket(run.data.dir):
        raise UserError(
            f"data.dir: {run.data.dir}: the host of a slice cannot see it; write gs://BUCKET/FOLDER"
        )
