"""Remote: launching on slices, and the verbs of `lmwright jobs` for jobs whose state is in a
bucket."""

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from lmwright.cloud.pieces import LogReader
from lmwright.cloud.roles import warn_of_roles
from lmwright.cloud.slices import MADE, Patience, Slices, begin, usage
from lmwright.cloud.spec import OVER, START, Spec, parse_spec, save_spec
from lmwright.cloud.stage import stage
from lmwright.cloud.steps import kept_steps, send_steps
from lmwright.cloud.target import settings_path, settings_with
from lmwright.cloud.tpu_api import Scarce, Tpus, queued_resource
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.guard.redact import redact_text
from lmwright.guard.terminal import visible
from lmwright.report.goodput import goodput, parse_sessions
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claimed
from lmwright.storage.mirror import fetched

EXIT_JOB_FAILED = 1
POLL_S = 5.0
NOTIFY_S = 30.0
NEEDED = ("storage.objects.create", "storage.objects.get", "storage.objects.list")
NEEDED += ("storage.objects.delete",)


def check(spec: Spec) -> list[str]:
    """Asks the services whether the job can run there; returns notes. Raises UserError."""
    assert spec.cloud is not None
    bucket, tpus, notes = Bucket(spec.url), Tpus(spec.cloud), []
    missing = bucket.missing_permissions(NEEDED)
    if missing:
        raise UserError(
            f"{spec.url}: this account may not {', '.join(missing)}; give it the role "
            "roles/storage.objectAdmin on the bucket"
        )
    region = bucket.region().lower()
    for offer in spec.offers:
        types = tpus.accelerator_types(offer.zone)
        if not offer.topology and offer.accelerator_type not in types:
            near = ", ".join(sorted(types)[:8]) or "none"
            raise UserError(f"--zone: {offer.zone} has no {offer.accelerator_type}; it has: {near}")
        if (runtimes := tpus.runtimes(offer.zone)) and offer.runtime not in runtimes:
            raise UserError(
                f"--on: {offer.zone} has no runtime version {offer.runtime}, which {offer.name} "
                "needs; choose another zone"
            )
        if region and not offer.zone.startswith(region) and region not in ("us", "eu", "asia"):
            notes.append(
                f"the bucket is in {region} and {offer.name} in {offer.zone}: what is read and "
                "saved crosses regions, which costs from 0.02 USD for each GB"
            )
    notes.append(f"the quota of project {spec.cloud.project} for these chips is not told by the "
                 "service; a request beyond it is refused")  # fmt: skip
    return notes + warn_of_roles(spec.cloud)


def describe(spec: Spec, code: str, run: Run | None) -> list[str]:
    """Every request and file that launching would make."""
    assert spec.cloud is not None
    lines = [f"would write {spec.url}/job.json, run.toml and {MADE}"]
    lines += [f"would put Python, all packages and this lmwright into {code}"]
    steps = [path.name for path in (kept_steps(run.name) if run else ())]
    lines += [f"would write {spec.url}/steps/{name}, compiled by plan" for name in steps]
    for number, offer in enumerate(spec.offers, 1):
        parent = f"projects/{spec.cloud.project}/locations/{offer.zone}"
        metadata = {"lmwright-job": spec.url, "startup-script": "..."}
        described = queued_resource(spec.cloud, f"{spec.name}-{number}", spec.name, offer, metadata)
        shown = type(described).to_json(described, indent=None)
        word = "would call" if number == 1 else "or else"
        lines.append(f"{word} POST {parent}/queuedResources?queuedResourceId={spec.name}-{number}")
        lines.append(f"  {redact_text(' '.join(shown.split()))}")
    return lines


def launch(spec: Spec, run: Run | None, code_root: str, *, detach: bool) -> int:
    """Stages, writes the job into its bucket and supervises it."""
    for note in check(spec):
        print(f"note: {note}")
    print("staging Python, packages and this lmwright in the bucket")
    begin(spec, stage(code_root), dump_toml(run) if run else "")
    if run is not None:
        send_steps(run.name, Bucket(spec.url))
    save_spec(spec)
    print(f"job {spec.name}: {spec.url}; run directory {spec.dir or 'none'}")
    return start(spec, detach=detach)


def start(spec: Spec, *, detach: bool = False) -> int:
    """Supervises here, or in a process of its own."""
    if not detach:
        return follow(spec)
    with open(spec.folder / "supervisor.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "lmwright", "jobs", "follow", spec.name],
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
    slices = Slices(spec, _tell, patience)
    try:
        state = slices.run()
    except KeyboardInterrupt:
        print(
            f"\njob {spec.name} goes on, but nobody replaces its slice; `lmwright jobs follow "
            f"{spec.name}` takes it up, `lmwright jobs stop {spec.name}` saves and ends it"
        )
        return EXIT_INTERRUPTED
    finally:
        slices.close()
    if state["status"] == "failed":
        text = f"lmwright: error: job {spec.name} failed: {visible(state['error'])}"
        print(text, file=sys.stderr)
        return EXIT_JOB_FAILED
    print(f"job {spec.name}: {state['status']} at step {state['step']}; no slice is left")
    return 0


def _tell(text: str) -> None:
    line = visible(redact_text(text))
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    if command := settings_with().notify:
        notify(command, line)


def notify(command: str, line: str) -> None:
    """Gives a line to the user's command. That it fails is told, and changes nothing."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], input=line + "\n", text=True, timeout=NOTIFY_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        reason = f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = type(error).__name__
    if reason:
        print(f"notify: the command of {settings_path()} failed ({reason})", flush=True)


def ssh(spec: Spec, host: int, words: Sequence[str]) -> int:
    """Opens a shell on a host by gcloud, or runs a command there; returns its exit code."""
    assert spec.cloud is not None
    there = Bucket(spec.url).read(MADE)
    book = json.loads(there[0]) if there else {"current": None}
    if book["current"] is None:
        raise UserError(f"job {spec.name} has no slice now")
    entry = book["made"][book["current"]]
    offer = spec.offers[entry["offer"]]
    if not 0 <= host < offer.hosts:
        raise UserError(f"--host: {host} is none of 0 to {offer.hosts - 1}")
    number, worker = divmod(host, offer.hosts_per_slice)
    node = entry["id"] if offer.num_slices == 1 else f"{entry['id']}-{number}"
    command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, f"--worker={worker}"]
    command += [f"--zone={offer.zone}", f"--project={spec.cloud.project}"]
    command += ["--command", shlex.join(words)] if words else []
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise UserError("gcloud is not installed, by which hosts are reached") from None


def adopt(url: str) -> Spec:
    """Makes a job of another machine known to this one, by its URL."""
    there = Bucket(url).read("job.json")
    if there is None:
        raise UserError(f"{url}: there is no job in this folder")
    try:
        spec = parse_spec(there[0])
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{url}/job.json: was written by another version of lmwright") from None
    if not spec.folder.exists():
        save_spec(spec)
    return spec


def state_of(spec: Spec) -> dict[str, Any]:
    """The state of a job in a bucket."""
    there = Bucket(spec.url).read("state.json")
    return json.loads(there[0]) if there else dict(START)


def show(spec: Spec) -> None:
    """Prints what is known of a job."""
    bucket, state = Bucket(spec.url), state_of(spec)
    there = bucket.read(MADE)
    book = json.loads(there[0]) if there else {"made": [], "current": None, "events": []}
    used = usage(spec, book)
    print(f"job {spec.name}: {state['status']}")
    print(f"  run directory  {spec.dir}")
    print(f"  state          {spec.url}")
    if book["current"] is not None:
        entry = book["made"][book["current"]]
        offer = spec.offers[entry["offer"]]
        print(f"  slice          {entry['id']}: {offer.name} in {offer.zone}")
    print(f"  slices so far  {len(book['made'])}, {used['hours']:.2f} h, "
          f"{used['chip_hours']:.1f} chip-hours, {used['cost']:.2f} USD by the list")  # fmt: skip
    print(f"  attempt        {state['attempt']}, {state['failures']} failures in a row")
    print(f"  step           {state['step']}, saved {state['saved']}")
    if slow := state.get("slow_hosts"):
        print(f"  slow hosts     {', '.join(map(str, slow))}")
    if state.get("error"):
        print(f"  last error     {visible(redact_text(state['error']))}")
    show_goodput(spec)
    for at, text in book["events"][-10:]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        print(f"  {stamp} {visible(redact_text(text))}")
    if written := bucket.read("events.log"):  # by the leader, on the slice
        for line in written[0].decode(errors="replace").splitlines()[-10:]:
            print(f"  {visible(redact_text(line))}")


def show_goodput(spec: Spec) -> None:
    """Prints how much of the run's time went into steps that counted, once that is known."""
    with contextlib.suppress(OSError, UserError):
        sessions = parse_sessions(fetched(f"{spec.dir}/sessions.json").read_bytes())
        if measured := goodput(sessions):
            print(f"  goodput        {measured.text()}")


def logs(spec: Spec, host: int, *, follow_it: bool) -> None:
    """Prints the output of a host's ranks, as it was carried to the bucket last."""
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
        print(f"job {spec.name} is over already: {status}")
    Bucket(spec.url).write("stop", "stopped as asked")
    print(f"job {spec.name} saves and ends; deleting its slice")
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
    bucket.remove("stop")
    fresh = {"status": "starting", "failures": 0, "error": ""}
    bucket.write("state.json", json.dumps(state | fresh))


def end(spec: Spec) -> None:
    """Deletes every slice of a job at once, without saving."""
    assert spec.cloud is not None
    tpus = Tpus(spec.cloud)
    for zone in {offer.zone for offer in spec.offers}:
        with contextlib.suppress(Scarce):
            for request in tpus.requests(zone):
                if request.job == spec.name:
                    tpus.delete(zone, request.id)


def forget(spec: Spec) -> None:
    """Removes a job's folder in the bucket."""
    bucket = Bucket(spec.url)
    for name in bucket.entries():
        bucket.remove(name)
