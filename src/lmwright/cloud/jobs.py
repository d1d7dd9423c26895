"""Command `lmwright jobs`: what is looked at and done after a launch."""

import math
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmwright.cloud import keeper, local, remote
from lmwright.cloud.kaggle import job as kaggle
from lmwright.cloud.spec import (
    OVER,
    Spec,
    job_names,
    load_spec,
    read_state,
    remove_job,
    write_state,
)
from lmwright.cloud.ssh import job as by_ssh
from lmwright.cloud.tell import Teller, last_words
from lmwright.cloud.tunnel import parse_tunnel
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.guard.terminal import visible
from lmwright.guard.urls import redact_text
from lmwright.storage.bucket import is_bucket

POLL_S = 0.5
LIST_S = 10.0
STOP_S = 300.0
EXIT_JOB_FAILED = 1


def find(name: str) -> Spec:
    """A job by its name, or by its folder in a bucket. Raises UserError."""
    spec = remote.adopt(name) if is_bucket(name) else load_spec(name)
    if by_ssh.is_ssh(spec):
        by_ssh.fetch(spec)
    return spec


def refuse_twice(run_dir: str, *, at_kaggle: bool) -> None:
    """Raises UserError where a job of this machine trains a run directory already, here or at
    Kaggle; jobs on slices are looked at by `remote`, those behind ssh by their hosts."""
    for name in job_names():
        with suppress(UserError):  # of another version
            other = load_spec(name)
            here = not other.url and not by_ssh.is_ssh(other)
            same = here and other.dir == run_dir and kaggle.is_kaggle(other) == at_kaggle
            now = read_state(other)["status"]
            if same and "train" in other.command[:2] and now not in OVER:
                break
    else:
        return
    raise remote.trained_already(run_dir, name, now)


def _supervise(spec: Spec) -> None:
    """Looks after a job once."""
    if kaggle.is_kaggle(spec):
        kaggle.look(spec)
    elif by_ssh.is_ssh(spec):
        by_ssh.supervise(spec)
    else:
        local.supervise(spec, once=True)


def begin(spec: Spec, detach: bool) -> int:
    """Supervises a new job here, or starts it and returns."""
    if detach:
        _supervise(spec)
        print(f"follow it with: lmwright jobs follow {spec.name}")
        return 0
    return follow(spec)


def follow(spec: Spec) -> int:
    """Supervises a job and prints what happens until it is over. Ctrl-C leaves it running."""
    events = _Tail(spec.folder / "events.log")
    output = _Tail(spec.folder / "logs" / "host-0.log")
    tell = Teller()
    goes_on = f"`lmwright jobs follow {spec.name}` takes job {spec.name} up again"
    try:
        with last_words(tell, goes_on):
            while read_state(spec)["status"] not in OVER:
                _supervise(spec)
                _print(output, events, tell)
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(
            f"\njob {spec.name} continues without supervision; `lmwright jobs follow {spec.name}` "
            f"resumes it, `lmwright jobs stop {spec.name}` "
            "saves and ends it"
        )
        return EXIT_INTERRUPTED
    except FileNotFoundError:
        if spec.folder.exists():
            raise
        raise UserError(f"job {spec.name} was forgotten while it was followed") from None
    time.sleep(POLL_S)
    _print(output, events, tell)
    state = read_state(spec)
    tell.pass_on(f"job {spec.name}: {state['status']} at step {state['step']} {state['error']}")
    if state["status"] == "failed":
        print(
            f"lmwright: error: job {spec.name} failed: {visible(redact_text(state['error']))}",
            file=sys.stderr,
        )
        return EXIT_JOB_FAILED
    return 0


def _print(output: "_Tail", events: "_Tail", tell: Teller) -> None:
    for line in output.lines():
        print(line)
    for line in events.lines():
        print(f"supervisor: {line}", file=sys.stderr)
        tell.pass_on(f"job {events.job}: {line}")


class _Tail:
    """The new lines of a file that grows."""

    def __init__(self, path: Path):
        self._path, self._at, self.job = path, 0, path.parent.name

    def lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        text = redact_text(whole.decode(errors="replace"))
        return [visible(line) for line in text.splitlines()]


def list_command() -> None:
    """Prints a line for each job."""
    names, specs = job_names(), []
    if not names:
        print("no jobs; `lmwright launch` starts one", file=sys.stderr)
    for name in names:
        try:
            specs.append(load_spec(name))
        except UserError as error:
            print(f"{name:<24} unknown   {error}")
    far = _states([spec for spec in specs if spec.url])
    for spec in specs:
        state = far[spec.name] if spec.url else read_state(spec)
        if state is None:
            print(f"{spec.name:<24} unknown   {spec.url} is not reached")
            continue
        step = f"step {state['step']}, saved {state['saved']}"
        where = f"attempt {state['attempt']:<3} {step:<28} {spec.dir or '-'}"
        print(f"{spec.name:<24} {state['status']:<9} {where}")


def _states(specs: Sequence[Spec]) -> dict[str, dict[str, Any] | None]:
    """States of jobs in buckets, all requested at once; None where there is no answer in time."""
    states: dict[str, dict[str, Any] | None] = {spec.name: None for spec in specs}

    def ask(spec: Spec) -> None:
        with suppress(UserError):
            states[spec.name] = remote.state_of(spec)

    threads = [threading.Thread(target=ask, args=(spec,), daemon=True) for spec in specs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIST_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(states)


def show_command(name: str) -> None:
    """Prints what is known of a job."""
    spec = find(name)
    if spec.url:
        remote.show(spec)
        return
    state = read_state(spec)
    over = state["status"] in OVER
    there = "" if over else f", there now: {state.get('hosts', [])}"
    print(f"job {spec.name}: {state['status']}")
    print(f"  run directory  {spec.dir or '-'}")
    print(f"  hosts          {spec.hosts}{there}")
    remote.show_state(state)
    # other jobs may have trained in the same run directory, before and since
    ended = state.get("time", math.inf) if over else math.inf
    remote.show_goodput(spec, (spec.folder / "job.json").stat().st_mtime, ended)
    for line in _Tail(spec.folder / "events.log").lines()[-10:]:
        print(f"  {line}")


def logs_command(name: str, host: int, follow_it: bool) -> None:
    """Prints the output of a host's ranks."""
    spec = find(name)
    if spec.url:
        remote.logs(spec, host, follow_it=follow_it)
        return
    spec.refuse_host(host)
    tail = _Tail(spec.folder / "logs" / f"host-{host}.log")
    while True:
        for line in tail.lines():
            print(line, flush=True)
        if not follow_it or read_state(spec)["status"] in OVER:
            return
        if by_ssh.is_ssh(spec):
            by_ssh.fetch(spec)
        time.sleep(POLL_S)


def follow_command(name: str) -> int:
    """Takes over the supervision of a job."""
    spec = find(name)
    if spec.url:
        return remote.follow(spec)
    if read_state(spec)["status"] in OVER:
        show_command(name)
        return 0
    return follow(spec)


def keep_command(name: str, zone: str, machine: str, *, dry_run: bool) -> int:
    """Lets a small VM supervise a job on slices."""
    spec = find(name)
    state = remote.state_of(spec) if spec.url else read_state(spec)
    return keeper.keep(spec, state, zone, machine, dry_run=dry_run)


def ssh_command(name: str, host: int, words: Sequence[str], tunnel: str | None = None) -> int:
    """Opens a shell on a host of a job on other machines, or runs a command there, or opens a
    tunnel to it."""
    leads = parse_tunnel(tunnel) if tunnel else None
    spec = remote.adopt(name) if is_bucket(name) else load_spec(name)
    if by_ssh.is_ssh(spec):
        return by_ssh.shell(spec, host, words, leads)
    if not spec.url:
        raise UserError(f"job {name} runs on this machine, so there is no host to connect to")
    return remote.ssh(spec, host, words, leads)


def start_command(name: str, *, detach: bool = False) -> int:
    """Starts a job that has ended again, from its newest checkpoint. Raises UserError while it
    runs."""
    spec = find(name)
    if spec.url:
        remote.restart(spec)
        return remote.start(spec, detach=detach)
    state = read_state(spec)
    if state["status"] not in OVER:
        raise UserError(
            f"job {name} is {state['status']} already; follow it with: lmwright jobs follow {name}"
        )
    if by_ssh.is_ssh(spec):
        by_ssh.restart(spec)
    (spec.folder / "stop").unlink(missing_ok=True)
    write_state(spec, state | {"status": "starting", "failures": 0, "error": ""})
    return begin(spec, detach)


def stop_command(name: str) -> None:
    """Lets a job save and end. Raises UserError if it does not within minutes."""
    spec = find(name)
    if spec.url:
        remote.stop(spec)
        return
    if (status := read_state(spec)["status"]) in OVER:
        print(f"job {name} is over already: {status}")
        return
    if kaggle.is_kaggle(spec):
        kaggle.stop(spec)
        return
    _supervise(spec)  # an agent that died cannot be told
    (spec.folder / "stop").touch()
    began = time.monotonic()
    while (state := read_state(spec))["status"] not in OVER:
        if time.monotonic() - began > STOP_S:
            raise UserError(
                f"job {name} did not end within {STOP_S:g} s; `lmwright jobs forget {name} "
                "--kill` ends it without saving"
            )
        time.sleep(POLL_S)
        _supervise(spec)
    print(f"job {name}: {state['status']} at step {state['step']}, saved {state['saved']}")


def forget_command(name: str, *, kill: bool = False) -> None:
    """Removes what is kept of a job, never its run directory. Raises UserError while it runs."""
    spec = find(name)
    state: dict[str, Any] = remote.state_of(spec) if spec.url else read_state(spec)
    running = state["status"] not in OVER and not (spec.url and not remote.is_written(spec))
    if running and not kill:
        raise UserError(
            f"job {name} is {state['status']}; stop it first: `lmwright jobs stop {name}`"
        )
    if spec.url:
        remote.forget(spec, kill=running)
    elif running and not by_ssh.is_ssh(spec):
        write_state(spec, state | {"status": "stopped", "error": "killed"})
        local.end_agents(spec)
        time.sleep(POLL_S)
    if kaggle.is_kaggle(spec):
        print("\n".join(kaggle.what_stays(spec)))
    if by_ssh.is_ssh(spec):
        by_ssh.forget(spec, kill=kill)
    if spec.folder.exists() and (not spec.url or remote.is_here(spec)):  # or that of the hosts
        remove_job(spec)
    stays = f"; its run directory {spec.dir} stays" if spec.dir else ""
    print(f"job {name} is forgotten{stays}")
