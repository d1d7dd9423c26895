"""Separate process for chat templates, with limits on its time and memory.

    this process --{"op", "template", ...}--> child --{"text", "turns"} or {"error"}-->
                   (a length, then JSON, both ways)

A template is a program of a stranger. The sandbox keeps it from our files and objects, but not
from looping for ever or from a string of terabytes; the kernel does, and ends the child. One
child serves every template of its process, and the next question starts another.
"""

import atexit
import functools
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lmwright.data.text.chat_render import NoTemplateError, Renderer, UnusableError
from lmwright.data.text.chat_turns import TurnFinder
from lmwright.errors import UserError

CPU_SECONDS = 10
"""CPU time for one question; a conversation of usual length takes less than a thousandth of it."""
MEMORY_BYTES = 1 << 30
TEXT_PER_BYTE, TEXT_BYTES = 200, 1 << 20
"""Limits on the text: longer than TEXT_BYTES, it may be TEXT_PER_BYTE times as long as the
conversation."""
TOO_MUCH = (
    f"the chat template takes more than {CPU_SECONDS} s of computing, or {MEMORY_BYTES >> 30} GiB, "
    "for one conversation"
)
TOO_DEEP = "it is nested too deeply"
MODULE = "lmwright.data.text.chat_child"
HEAD = struct.Struct("<Q")


class LimitError(Exception):
    """A template exceeded the limits; the text says which."""


class Child:
    """The process and the templates that it knows. Threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._known: set[str] = set()
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, template: str, question: dict[str, Any]) -> dict[str, Any]:
        """Answer to a question about a template; the question is JSON of the arguments of a
        Renderer.

        Raises UnusableError, NoTemplateError, or LimitError where it took too much.
        """
        with self._lock:
            answer = self._ask(template, question)
        for kind in (UnusableError, NoTemplateError, LimitError):
            if kind.__name__ in answer:
                raise kind(answer[kind.__name__])
        return answer

    def _ask(self, template: str, question: dict[str, Any]) -> dict[str, Any]:
        process = self._running()
        name = _name(template)
        source = {} if name in self._known else {"source": template}
        try:
            _send(process.stdin, {"name": name, **source, **question})
            answer = _receive(process.stdout)
        except RecursionError:
            return {"UnusableError": TOO_DEEP}
        except BrokenPipeError:
            answer = None
        except BaseException:  # half a question or answer is in the pipes
            self.close()
            raise
        if answer is None:
            self.close()
            return {"LimitError": TOO_MUCH}
        if "NoTemplateError" not in answer:
            self._known.add(name)
        return answer

    def _running(self) -> subprocess.Popen:
        if self._owner != os.getpid():  # after a fork the child is another process's
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._known.clear()
            package = Path(__file__).parents[3]
            path = os.pathsep.join([str(package), *(p for p in sys.path if p)])
            limits = (str(CPU_SECONDS), str(MEMORY_BYTES))
            command = [sys.executable, "-P", "-m", MODULE, *limits]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is this process's
                )
            except OSError as e:
                raise UserError(
                    "data.chat.template: no process could be started to render it "
                    f"({e.strerror}); end other processes and run the same command again"
                ) from None
            if _receive(self._process.stdout) is None:
                self.close()
                raise UserError(
                    "data.chat.template: the process that renders it exits at once; see what "
                    f"`{' '.join(command)}` says"
                )
        return self._process

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not sent yet
                pipe.close()
        process.wait()


@functools.lru_cache(64)
def _name(template: str) -> str:
    return hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()


CHILD = Child()
atexit.register(CHILD.close)


def _send(pipe: BinaryIO, body: dict[str, Any]) -> None:
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    pipe.write(HEAD.pack(len(raw)) + raw)
    pipe.flush()


def _receive(pipe: BinaryIO) -> dict[str, Any] | None:
    """Next message of a pipe; None at the end."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    raw = pipe.read(size)
    return json.loads(raw.decode("utf-8", "surrogatepass")) if len(raw) == size else None


def serve(cpu_seconds: float, memory_bytes: int) -> None:
    """Answers questions from stdin until it ends."""
    _limit_memory(memory_bytes)
    # a process that ignores or blocks the clock's signal leaves that to its children
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    finders: dict[str, TurnFinder] = {}
    _send(sys.stdout.buffer, {"ready": True})
    while True:
        # the kernel's clock of this process ends it, inside a call into C too
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            question = _receive(sys.stdin.buffer)
            if question is None:
                return
            answer = _answer(question, finders)
        except RecursionError:
            answer = {"UnusableError": TOO_DEEP}
        except MemoryError:
            answer = {"LimitError": TOO_MUCH}
        _send(sys.stdout.buffer, answer)


def _limit_memory(memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
    with suppress(ValueError, OSError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def _answer(question: dict[str, Any], finders: dict[str, TurnFinder]) -> dict[str, Any]:
    name, conversation = question["name"], question.get("conversation", {})
    try:
        if name not in finders:
            finders[name] = TurnFinder(Renderer(**json.loads(question["source"])))
        finder = finders[name]
        if question["op"] == "compile":
            return {"marked": finder.renderer.marked}
        if question["op"] == "turns":
            text, turns, of = finder.turns(conversation)
        else:
            messages, tools = conversation["messages"], conversation.get("tools")
            text = finder.renderer.text(messages, tools, prompt=question["prompt"])
            turns = of = ()
    except (UnusableError, NoTemplateError) as e:
        return {type(e).__name__: str(e)}
    if len(text) > TEXT_BYTES and len(text) > TEXT_PER_BYTE * len(json.dumps(conversation)):
        return {"LimitError": f"the chat template makes {len(text):,} letters of it"}
    return {"text": text, "turns": turns, "of": of}


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
