"""Jobs at Kaggle: one session after the other, each in a kernel.

    kernel a --output--> kernel b --output--> kernel a ...
    session 1            session 2            session 3
       '--> session.json: done | again | failed

A session begins with what the last good one left in its kernel's output, so that nothing large
comes here before the end. The job's folder has kaggle.json (what was sent) beside the files of any
job; all that a supervisor knows is there, so that it may be ended at any time.
"""

import hashlib
import json
import re
import shutil
import tarfile
import threading
import time
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from lmwright.cloud.kaggle.kernel import ERROR
from lmwright.cloud.kaggle.push import script, write_kernel
from lmwright.cloud.kaggle.service import ALIVE, Kaggle, Quota, Unreachable
from lmwright.cloud.kaggle.session import RESULT, newest_step, unpack
from lmwright.cloud.leader import AGAIN_CODES
from lmwright.cloud.spec import OVER, Spec, read_state, write_state
from lmwright.errors import UserError
from lmwright.guard.temporary import temporary_file, temporary_folder

FACTS = "kaggle.json"
LOOK_EVERY_S = 20.0
LEAST_SESSION_S = 1800.0
STALE_S = 900.0
"""Time after a push in which the service may still report the session before."""
FAILURES = 3
"""Number of sessions in a row that save nothing new before the job fails."""
LAST_LINES = 10
"""Lines shown of a log; errors before them were survived."""
LONGEST_NAME = 50

State = dict[str, Any]


def is_kaggle(spec: Spec) -> bool:
    """True for a job at Kaggle."""
    return (spec.folder / FACTS).exists()


def kernels_of(user: str, name: str) -> list[str]:
    """The two kernels of a job, which take turns. No two jobs have the same, also where a name is
    too long for Kaggle or has other signs."""
    slug = re.sub(r"[-_.]+", "-", f"lmwright-{name}").rstrip("-")
    if slug != f"lmwright-{name}" or len(slug) > LONGEST_NAME - 2:
        mark = hashlib.sha256(name.encode()).hexdigest()[:6]
        slug = f"{slug[: LONGEST_NAME - 9].rstrip('-')}-{mark}"
    return [f"{user}/{slug}-{end}" for end in "ab"]


def quota_line(quota: Quota | None) -> str:
    """Sentence about the week's TPU time."""
    if quota is None:
        return "TPU quota of this week: unknown (Kaggle does not say)"
    refresh = f", renewed {quota.refreshed:%Y-%m-%d %H:%M} UTC" if quota.refreshed else ""
    return (
        f"TPU quota of this week: {quota.left_s / 3600:.1f} of {quota.total_s / 3600:.1f} h left"
        f"{refresh}"
    )


@cache
def _service() -> Kaggle:
    return Kaggle()


def look(spec: Spec, service: Kaggle | None = None) -> None:
    """Looks after a job once: starts its next session, or checks the present one. Without a service
    it does so at intervals only. Raises UserError for what a person must mend."""
    state = read_state(spec)
    if state["status"] in OVER or (service is None and time.time() < state.get("next", 0)):
        return
    try:
        _Look(spec, service or _service(), state).run()
    except Unreachable as error:
        if not state["attempt"]:
            raise
        _note(spec, f"Kaggle cannot be asked: {error}")
    state |= {"next": time.time() + LOOK_EVERY_S, "time": time.time(), "hosts": [0]}
    write_state(spec, state)


class _Look:
    """One look at a job, whose state it changes."""

    def __init__(self, spec: Spec, service: Kaggle, state: State):
        self.spec, self.service, self.state = spec, service, state
        self.facts = json.loads((spec.folder / FACTS).read_bytes())

    def run(self) -> None:
        if "ending" in self.state:
            self._finish(*self.state["ending"])
        elif "pushed" in self.state:
            self._see()
        elif (self.spec.folder / "stop").exists():
            self._finish("stopped", "stopped as asked")
        else:
            self._begin()

    def _begin(self) -> None:
        """Starts the next session, or waits for the quota."""
        quota, seconds = self.service.quota(), self.facts["seconds"]
        if quota is not None:
            if quota.left_s < min(LEAST_SESSION_S, seconds):
                if self.state["status"] != "waiting":
                    self._note(f"{quota_line(quota)}; waiting for more")
                self.state["status"] = "waiting"
                return
            seconds = min(seconds, quota.left_s)
        number = self.state["attempt"] + 1
        good = self.state.get("good")
        kernels = kernels_of(self.facts["user"], self.spec.name)
        kernel = kernels[1] if good and good["kernel"] == kernels[0] else kernels[0]
        log = self.spec.folder / "logs" / "host-0.log"
        begun = {
            "status": "running",
            "attempt": number,
            "kernel": kernel,
            "reused": kernel in self.state.get("used", ()),
            "used": sorted({kernel, *self.state.get("used", ())}),
            "pushed": time.time(),
            "service": "",
            "log_at": log.stat().st_size if log.exists() else 0,
        }
        url = self._push(kernel, number, seconds, good)
        self.state |= begun
        write_state(self.spec, self.state)
        self._note(f"session {number} of {seconds / 3600:.1f} h begins: {url}")

    def _push(self, kernel: str, number: int, seconds: float, good: State | None) -> str:
        """Starts a session; one of that number that is there already is taken for it."""
        if self.state.get("pushing") == number:
            session = self.service.session(kernel)
            if session is not None and session.state in ALIVE:
                return f"https://www.kaggle.com/code/{kernel}"
        self.state["pushing"] = number
        write_state(self.spec, self.state)
        told = self.facts["settings"] | {"session": number, "seconds": seconds}
        if good:
            archives = {name: to for name, to in told["archives"].items() if to != "run"}
            told["archives"] = archives | {good["archive"]: "run"}
            told["files"] = [*told["packages"], *told["archives"]]
        datasets = [f"{self.facts['user']}/{slug}" for slug in self.facts["datasets"]]
        with temporary_folder() as folder:
            sources = [good["kernel"]] if good else []
            write_kernel(Path(folder), kernel, script(told), datasets, sources)
            return self.service.push(Path(folder), int(seconds))

    def _see(self) -> None:
        """Checks how the present session stands."""
        state, number = self.state, self.state["attempt"]
        session = self.service.session(state["kernel"])
        now = "gone" if session is None else session.state
        if now in ALIVE:
            if state["service"] != now:
                self._note(f"session {number}: {now.lower()}")
            state["service"] = now
            if now == "RUNNING":
                _Log.follow(self.spec, self.service, state)
            return
        result = self._result()
        if (result or {}).get("session") != number:
            if state["reused"] and not state["service"] and time.time() < state["pushed"] + STALE_S:
                return
            result = None
        _Log.finish(self.spec, self.service, state)
        del state["pushed"]
        if result is None:
            message = session.message if session else ""
            error = self._error() or message or f"it ended as {now.lower()}"
            self._lost(f"session {number} left nothing: {error}")
        else:
            self._take(number, result)

    def _take(self, number: int, result: State) -> None:
        """Acts on what a session left."""
        state, code = self.state, result["code"]
        gained = result["saved"] > state["saved"]
        state |= {"step": result["step"], "saved": max(result["saved"], state["saved"])}
        if result["archive"] and (gained or code == 0):
            state["good"] = {"kernel": state["kernel"], "archive": result["archive"]}
        self._note(f"session {number}: exit code {code} at step {result['step']}")
        if code == 0:
            self._finish("done", "")
        elif code not in AGAIN_CODES:
            self._finish("failed", result["error"] or f"exit code {code}")
        elif gained:
            state["failures"] = 0
        else:
            why = f": {told.replace(ERROR, '')}" if (told := result["error"]) else ""
            self._lost(f"session {number} saved nothing new{why}")

    def _lost(self, error: str) -> None:
        """Handles a session that brought nothing: the next one tries again, unless nothing can
        help."""
        self.state["failures"] += 1
        self.state["error"] = error
        self._note(error)
        if ERROR in error or self.state["failures"] >= FAILURES:
            self._finish("failed", error)

    def _result(self) -> State | None:
        try:
            path = self.service.fetch(self.state["kernel"], RESULT, self.spec.folder)
            return None if path is None else json.loads(path.read_bytes())
        except (UserError, ValueError):
            return None

    def _error(self) -> str:
        """The error that the session's log ends with."""
        path = self.spec.folder / "logs" / "host-0.log"
        text = path.read_bytes()[self.state["log_at"] :] if path.exists() else b""
        last = text.decode(errors="replace").splitlines()[-LAST_LINES:]
        told = [line for line in last if ERROR in line]
        return told[-1].strip() if told else ""

    def _finish(self, status: str, error: str) -> None:
        """Ends a job, after its run directory is here."""
        self.state["ending"] = [status, error]
        write_state(self.spec, self.state)
        if good := self.state.get("good"):
            archive = self.service.fetch(good["kernel"], good["archive"], self.spec.folder)
            if archive is None:
                raise UserError(
                    f"job {self.spec.name}: {good['archive']} is not in the output of "
                    f"{good['kernel']} any more; look for it on Kaggle's page"
                )
            self._note(f"fetched {good['archive']} into {bring_home(self.spec, archive)}")
        del self.state["ending"]
        self.state |= {"status": status, "error": error}
        self._note(f"{status}{': ' + error if error else ''}")

    def _note(self, text: str) -> None:
        _note(self.spec, text)


def _note(spec: Spec, text: str) -> None:
    with open(spec.folder / "events.log", "a") as events:
        now = datetime.now().astimezone()  # as those of other jobs
        events.write(f"{now.isoformat(' ', 'milliseconds')} {text}\n")


def bring_home(spec: Spec, archive: Path) -> Path:
    """Unpacks the fetched run directory to its place and moves the existing one aside. If the
    existing one was trained further in the meantime, it stays and the fetched one is put aside."""
    target = Path(spec.dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = temporary_file(target.parent, target.name)  # on the disk of the run directory
    try:
        hidden.mkdir()
        fetched = hidden / "run"
        unpack(archive, fetched)
        if newest_step(str(target)) > newest_step(str(fetched)):
            target = _free(target.with_name(f"{target.name}.from-{spec.name}"))
        elif target.exists():
            target.rename(_free(target.with_name(f"{target.name}.before-{spec.name}")))
        fetched.rename(target)
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"job {spec.name}: {archive.name} cannot be unpacked into {target} ({reason}); free "
            f"some space, then: lmwright jobs follow {spec.name}"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    archive.unlink()
    return target


def _free(path: Path) -> Path:
    """The path, or the first with a number after it where nothing is yet."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


class _Log:
    """Copies the output of a session into the job's log, in a thread that dies with us. The
    service tells it from its beginning each time."""

    threads: dict[tuple[str, int], threading.Thread] = {}  # noqa: RUF012

    @classmethod
    def follow(cls, spec: Spec, service: Kaggle, state: State) -> None:
        key = spec.name, state["attempt"]
        there = cls.threads.get(key)
        if there is None or not there.is_alive():
            words = (spec, service, state["kernel"], state["log_at"])
            cls.threads[key] = threading.Thread(target=cls._copy, args=words, daemon=True)
            cls.threads[key].start()

    @classmethod
    def finish(cls, spec: Spec, service: Kaggle, state: State) -> None:
        thread = cls.threads.pop((spec.name, state["attempt"]), None)
        if thread is not None:
            thread.join(LOOK_EVERY_S)
        if thread is None or not thread.is_alive():
            cls._copy(spec, service, state["kernel"], state["log_at"])

    @staticmethod
    def _copy(spec: Spec, service: Kaggle, kernel: str, at: int) -> None:
        path = spec.folder / "logs" / "host-0.log"
        skip = (path.stat().st_size if path.exists() else 0) - at
        with suppress(Exception), open(path, "ab", buffering=0) as file:
            for line in service.log(kernel):
                data = line.encode()
                file.write(data[max(skip, 0) :])
                skip -= len(data)


def stop(spec: Spec) -> None:
    """Lets no further session begin; the present one cannot be told."""
    (spec.folder / "stop").touch()
    state = read_state(spec)
    if "pushed" not in state:
        look(spec, _service())
        print(f"job {spec.name}: {read_state(spec)['status']}")
        return
    facts = json.loads((spec.folder / FACTS).read_bytes())
    end = datetime.fromtimestamp(state["pushed"] + facts["seconds"])
    print(
        f"job {spec.name}: a session cannot be told to save; this one ends by itself by "
        f"{end:%Y-%m-%d %H:%M}, and no other begins. `lmwright jobs follow {spec.name}` fetches "
        f"what it leaves. To lose it and end it now, stop it at {page(state)}"
    )


def page(state: State) -> str:
    """Address of a job's kernel."""
    return f"https://www.kaggle.com/code/{state['kernel']}"


def what_stays(spec: Spec) -> list[str]:
    """Lines about what a forgotten job leaves at Kaggle."""
    facts = json.loads((spec.folder / FACTS).read_bytes())
    state = read_state(spec)
    alive = [f"its session still runs; stop it at {page(state)}"] if "pushed" in state else []
    return [
        *alive,
        f"at Kaggle stay kernels {', '.join(kernels_of(facts['user'], spec.name))}",
        f"and private datasets {', '.join(facts['datasets'])}",
    ]
