"""Remote: launching on slices, and the verbs of `lmwright jobs` for jobs whose state is in a
bucket."""

import contextlib
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from lmwright.cloud import keeper
from lmwright.cloud.book import Book, begin, label_of, read_book, read_job_state, usage
from lmwright.cloud.checks import check
from lmwright.cloud.pieces import LogReader
from lmwright.cloud.slices import GOING, Patience, Slices, service_of
from lmwright.cloud.spec import (
    NAME,
    OVER,
    PROGRAM,
    Spec,
    job_names,
    load_spec,
    parse_spec,
    remove_job,
    save_spec,
)
from lmwright.cloud.stage import stage
from lmwright.cloud.steps import send_steps
from lmwright.cloud.target import NO_GCLOUD
from lmwright.cloud.tell import Teller, last_words
from lmwright.cloud.times import fill_in_current
from lmwright.cloud.tunnel import Tunnel, run_until_interrupted
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.guard.terminal import visible
from lmwright.guard.urls import redact_text
from lmwright.report.goodput import goodput, ledger, parse_sessions
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claimed
from lmwright.storage.mirror import fetched

EXIT_JOB_FAILED = 1
TRAINS = (PROGRAM, "train")
OPEN_SHELL = ("compute", "tpus", "tpu-vm", "ssh")
POLL_S = 5.0
DELETE_S, DELETE_POLL_S = 120.0, 1.0


def launch(spec: Spec, run: Run | None, code_root: str, *, detach: bool) -> int:
    """Stages, writes the job into its bucket and supervises it."""
    _refuse_twice(spec)
    for note in check(spec):
        print(f"note: {note}")
    save_spec(spec)  # first, since its name may be taken
    try:
        print("staging Python, packages and this lmwright in the bucket")
        begin(spec, stage(code_root), dump_toml(run) if run else "")
        if run is not None:
            send_steps(run.name, Bucket(spec.url))
    except BaseException:
        if not is_written(spec):
            remove_job(spec)
        raise
    print(f"job {spec.name}: {spec.url}; run directory {spec.dir or 'none'}")
    return start(spec, detach=detach)


def _refuse_twice(spec: Spec) -> None:
    """Raises UserError where a job of this machine trains the run already: its slice would be paid
    for beside the new one, which then finds the run directory claimed."""
    for name in job_names() if spec.command[:2] == TRAINS else ():
        with contextlib.suppress(UserError):  # of another version, or its bucket is not reached
            other = load_spec(name)
            same = other.url and other.dir == spec.dir and other.command[:2] == TRAINS
            if same and is_written(other) and (now := state_of(other)["status"]) not in OVER:
                break
    else:
        return
    raise trained_already(spec.dir, name, now)


def trained_already(run_dir: str, name: str, now: str) -> UserError:
    """The error of a run that a job trains, which is `now` running, say."""
    return UserError(
        f"dir: {run_dir} is trained by job {name} already, which is {now}; follow it: lmwright "
        f"jobs follow {name}; or end it (lmwright jobs stop {name}), or choose another dir"
    )


def is_written(spec: Spec) -> bool:
    """True for a job that this launch has written into its bucket."""
    with contextlib.suppress(UserError, ValueError, TypeError, KeyError):
        there = Bucket(spec.url).read("job.json")
        return there is not None and parse_spec(there[0]).token == spec.token
    return False


def start(spec: Spec, *, detach: bool = False) -> int:
    """Supervises here, or in a process of its own."""
    if not detach:
        return follow(spec)
    with open(spec.folder / "supervisor.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "lmwright", "jobs", "follow", spec.url],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    print(f"supervised in the background; see: lmwright jobs show {spec.name}")
    return 0


def follow(spec: Spec, patience: Patience | None = None) -> int:
    """Supervises a job until it is over. Ctrl-C leaves it running, but nobody then replaces its
    slice."""
    if Bucket(spec.url).read("job.json") is None:
        raise UserError(
            f"{spec.url}: its launch was interrupted before the job was written, and nothing was "
            f"asked for; `lmwright jobs forget {spec.name}`, and launch it again"
        )
    tell = Teller()
    slices = Slices(spec, tell, patience)
    goes_on = f"`lmwright jobs follow {spec.name}` takes job {spec.name} up again; until then "
    goes_on += "nobody replaces or deletes its slice"
    try:
        with last_words(tell, goes_on):
            state = slices.run()
    except KeyboardInterrupt:
        print(
            f"\njob {spec.name} continues, but nothing replaces a lost slice; `lmwright jobs "
            f"follow {spec.name}` resumes that, `lmwright jobs stop {spec.name}` saves and ends it"
        )
        return EXIT_INTERRUPTED
    finally:
        slices.close()
    if state["status"] == "failed":
        error = visible(redact_text(state["error"]))
        text = f"job {spec.name} failed: {error}"
        tell.pass_on(text)
        option = error.startswith("--")  # of the launch, which asks for what is not to be had
        print(f"lmwright: error: {error if option else text}", file=sys.stderr)
        return UserError.exit_code if option else EXIT_JOB_FAILED
    tell(f"job {spec.name}: {state['status']} at step {state['step']}; no slice is left")
    return 0


def ssh(spec: Spec, host: int, words: Sequence[str], tunnel: Tunnel | None = None) -> int:
    """Opens a shell on a host by gcloud or kubectl, or runs a command there, or opens a tunnel;
    returns its exit code."""
    assert spec.cloud is not None
    book = read_book(Bucket(spec.url))
    if book["current"] is None:
        raise UserError(f"job {spec.name} has no slice now")
    entry = book["made"][book["current"]]
    offer = spec.offers[entry["offer"]]
    spec.refuse_host(host, offer.hosts)
    if spec.cloud.gke is not None:
        from lmwright.cloud.gke.describe import shell

        return shell(spec, entry["id"], offer, host, words, tunnel)
    number, worker = divmod(host, offer.hosts_per_slice)
    node = entry["id"] if offer.num_slices == 1 else f"{entry['id']}-{number}"
    place = [node, f"--worker={worker}", f"--zone={offer.zone}", f"--project={spec.cloud.project}"]
    command = ["gcloud", *OPEN_SHELL, *place]
    command += ["--command", shlex.join(words)] if words else []
    command += ["--", *tunnel.words(), *([] if words else ["-N"])] if tunnel else []
    try:
        code = run_until_interrupted(command, tunnel, host)
    except FileNotFoundError:
        raise UserError(NO_GCLOUD) from None
    if code and not spec.cloud.external_ips:
        print(
            f"note: {node} has internal addresses only, which are reached from its network; from "
            f"elsewhere: gcloud alpha {shlex.join([*OPEN_SHELL, *place])} --tunnel-through-iap",
            file=sys.stderr,
        )
    return code


def adopt(url: str) -> Spec:
    """Makes a job of another machine known to this one, by its URL. Where its name is another
    job's here, it is known by its URL only."""
    there = Bucket(url).read("job.json")
    if there is None:
        raise UserError(f"{url}: there is no job in this folder")
    try:
        spec = parse_spec(there[0])
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{url}/job.json: was written by another version of lmwright") from None
    # Without its own address it would be taken for a job of this machine, whose command runs here.
    if spec.url != url.rstrip("/") or spec.cloud is None or not NAME.fullmatch(spec.name):
        raise UserError(
            f"{url}/job.json: is not of a job in this folder, but of "
            f"{visible(spec.url or spec.name)[:99]}; name that folder, if you know whose it is"
        )
    if not spec.folder.exists():
        save_spec(spec)
    return spec


def is_here(spec: Spec) -> bool:
    """True if the folder of the job's name on this machine is the job's."""
    with contextlib.suppress(UserError):
        return load_spec(spec.name).token == spec.token
    return False


def state_of(spec: Spec) -> dict[str, Any]:
    """The state of a job in a bucket."""
    return read_job_state(Bucket(spec.url))


def show(spec: Spec) -> None:
    """Prints what is known of a job."""
    bucket, state = Bucket(spec.url), state_of(spec)
    book = read_book(bucket)
    with contextlib.suppress(UserError):  # it then counts as there
        fill_in_current(spec, bucket, book, state, lambda: service_of(spec))
    used = usage(spec, book)
    print(f"job {spec.name}: {state['status']}")
    print(f"  run directory  {spec.dir}")
    print(f"  state          {spec.url}")
    if book["current"] is not None:
        entry = book["made"][book["current"]]
        offer = spec.offers[entry["offer"]]
        print(f"  slice          {entry['id']}: {offer.name} in {offer.zone}")
    for line in keeper.lines(spec):
        print(f"  {line}")
    print(f"  slices so far  {len(book['made'])}, {used['hours']:.2f} h, "
          f"{used['chip_hours']:.1f} chip-hours, {used['cost']:.2f} USD by the list")  # fmt: skip
    show_state(state)
    show_goodput(spec)
    for at, text in book["events"][-10:]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        print(f"  {stamp} {visible(redact_text(text))}")
    if written := bucket.read("events.log"):  # by the leader, on the slice
        for line in written[0].decode(errors="replace").splitlines()[-10:]:
            print(f"  {visible(redact_text(_in_this_zone(line)))}")


def show_state(state: Mapping[str, Any]) -> None:
    """Prints how far a job is, and its last error."""
    print(f"  attempt        {state['attempt']}, {state['failures']} failures in a row")
    print(f"  step           {state['step']}, saved {state['saved']}")
    if slow := state.get("slow_hosts"):
        print(f"  slow hosts     {', '.join(map(str, slow))}")
    if state.get("error"):
        print(f"  last error     {visible(redact_text(state['error']))}")


def _in_this_zone(line: str) -> str:
    """An event of the leader, with its time as this machine's clock shows it."""
    date, clock, text = [*line.split(" ", 2), "", ""][:3]
    try:
        at = datetime.fromisoformat(f"{date} {clock}")
    except ValueError:
        return line
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S} {text}" if at.tzinfo else line


def show_goodput(spec: Spec, since: float = 0.0, until: float = math.inf) -> None:
    """Prints how much of the time of the run's sessions that began between two times, by the clock,
    went into steps that counted, once that is known."""
    with contextlib.suppress(OSError, UserError):
        sessions = parse_sessions(fetched(f"{spec.dir}/sessions.json").read_bytes())
        own = [session for session in sessions if since <= session["began"] <= until]
        if measured := goodput(own):
            rows = ledger(measured)
            print(f"  goodput        {rows.pop('goodput')} of {rows.pop('in all')} with machines")
            for name, text in rows.items():
                print(f"    {name:<12} {text}")


def logs(spec: Spec, host: int, *, follow_it: bool) -> None:
    """Prints the output of a host's ranks, as it was carried to the bucket last."""
    spec.refuse_host(host, max(offer.hosts for offer in spec.offers))
    reader = LogReader(Bucket(spec.url), host)
    while True:
        over = state_of(spec)["status"] in OVER
        for line in reader.lines(over=over):
            print(visible(redact_text(line)), flush=True)
        if not follow_it or over:
            return
        time.sleep(POLL_S)


def stop(spec: Spec) -> None:
    """Asks a job to save and end; its supervisor then deletes the slice."""
    if (status := state_of(spec)["status"]) in OVER:
        print(f"job {spec.name} is over already: {status}; looking for slices of it")
    else:
        print(f"job {spec.name} saves and ends; deleting its slice")
    Bucket(spec.url).write("stop", "stopped as asked")
    with contextlib.suppress(Claimed):  # another supervisor is alive, and does it
        follow(spec)
        return
    while state_of(spec)["status"] not in OVER:
        time.sleep(POLL_S)
    print(f"job {spec.name}: {state_of(spec)['status']}")


def restart(spec: Spec) -> None:
    """Lets an ended job begin again."""
    bucket, state = Bucket(spec.url), state_of(spec)
    if state["status"] not in OVER:
        raise UserError(f"job {spec.name} is {state['status']} already")
    if state["status"] == "done" and spec.command[:2] == TRAINS:
        raise UserError(
            f"job {spec.name} is done at step {state['step']}, so you would pay for a slice for "
            "nothing; for more steps, launch the run with a higher train.steps"
        )
    book = Book(bucket)
    book.facts |= {"failures": 0, "bad_slices": 0}
    book.write()
    bucket.remove("stop")
    fresh = {"status": "starting", "failures": 0, "error": ""}
    bucket.write("state.json", json.dumps(state | fresh))


def end(spec: Spec, wait_s: float = DELETE_S) -> None:
    """Deletes every slice of a job at once, without saving. Raises UserError where one stays."""
    service, until = service_of(spec), time.monotonic() + wait_s
    while True:
        left = [
            (zone, request)
            for zone in dict.fromkeys(offer.zone for offer in spec.offers)
            for request in service.requests(zone)
            if request.job == label_of(spec) and request.state not in GOING
        ]
        if not left:
            return
        if time.monotonic() > until:
            names = ", ".join(f"{request.id} in {zone}" for zone, request in left)
            raise UserError(
                f"job {spec.name}: {names} cannot be deleted now; try again in a few minutes"
            )
        for zone, request in left:
            print(f"deleting {request.id} in {zone}")
            service.delete(zone, request.id)
        time.sleep(DELETE_POLL_S)


def forget(spec: Spec, *, kill: bool) -> None:
    """Removes a job's folder in the bucket, once it has no slice; with `kill`, one that runs."""
    bucket = Bucket(spec.url)
    if kill:
        killed = {"status": "stopped", "error": "killed"}
        bucket.write("state.json", json.dumps(state_of(spec) | killed))
    keeper.remove(spec)  # first, before it asks for another slice
    end(spec)
    for name in bucket.entries():
        bucket.remove(name)
