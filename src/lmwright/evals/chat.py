"""Conversation with a model on a terminal: `lmwright chat`.

message --conversation so far, template--> ids --model--> answer, streamed --> conversation
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmwright.core.cards import refuse_lost_card
from lmwright.errors import UserError
from lmwright.evals.chat_prompts import answer_of
from lmwright.evals.compute import Kernels, compute_text
from lmwright.evals.prompt_rows import ContextFullError
from lmwright.evals.prompted import Asked, ask, kept_weights, show
from lmwright.evals.sampling import Sampling
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel

PROMPT = "> "
NEW = "/new"
HELLO = {"role": "user", "content": "Hello."}
HELP = f"{NEW} forgets what was said; Ctrl-C ends an answer, Ctrl-D the chat"


class Conversation:
    """Messages so far, and the model that answers them."""

    def __init__(self, loaded: LoadedModel, settings: Sampling, system: str | None, **how: Any):
        self._loaded, self._settings = loaded, settings
        self._how = {"chat": True, "field": "--system" if system else "message", **how}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []

    def forget(self) -> None:
        """Begins anew."""
        self.messages.clear()

    def try_out(self) -> Asked:
        """The prompt of a short message. Raises UserError where the model, the settings or
        the system message do not fit."""
        return ask(self._loaded, [[*self._system, HELLO]], self._settings, **self._how)

    def answer(self, message: str, on_text: Callable[[str], None]) -> str:
        """The answer to a message, which is streamed to `on_text`; Ctrl-C ends it early. Returns
        why it ended: end, stop, length, context or interrupt.

        The oldest messages are forgotten if the context has no room. Raises UserError for a message
        that alone is too long, or that the template refuses.
        """
        told = [*self.messages, {"role": "user", "content": message}]
        while (asked := self._ask(told)) is None:
            del told[:2]
        said: list[str] = []
        tokens: tuple[int, ...] | None = None

        def stream(_row: int, text: str) -> None:
            said.append(text)
            on_text(text)

        try:
            (made,) = asked.texts(kept_weights(self._loaded, asked.compute), stream)
            why: str = made.finish
            tokens = made.tokens
        except KeyboardInterrupt:
            why = "interrupt"
        self.messages = [*told, answer_of(self._loaded.tokenizer, tokens, "".join(said))]
        return why

    def _ask(self, told: list[dict[str, str]]) -> Asked | None:
        """None where the context has too little room for an answer, and could have more."""
        last, most = len(told) < 3, self._loaded.model.seq_len
        try:
            asked = ask(self._loaded, [[*self._system, *told]], self._settings, **self._how)
        except ContextFullError:
            if last:
                raise
            return None
        room = most - len(asked.prompts[0])
        return asked if last or room >= min(self._settings.max_new_tokens, most // 4) else None


def chat_command(
    path: str | Path,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    precision: str | None = None,
    kernels: Kernels = "platform",
    adapter: str | None = None,
    devices: int | None = None,
) -> int:
    """Answers the lines of stdin, one message each, until its end; returns 0. `system` is put
    before the conversation. Raises UserError for a model without a chat template."""
    settings = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(stop), seed)
    refuse_lost_card()  # before the weights are read
    loaded = load_model(path, adapter, num_devices=devices)
    talk = Conversation(loaded, settings, system, precision=precision, kernels=kernels)
    first = talk.try_out()  # what is wrong is said before anybody writes
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and earlier lines in input()
        print(
            f"[{Path(path).name}, {compute_text(first.compute, loaded.num_devices)}; {HELP}]",
            file=sys.stderr,
        )
    while True:
        try:
            message = input(PROMPT if terminal else "").strip()
            if message == NEW:
                talk.forget()
            elif message:
                _answer(talk, message, terminal)
        except EOFError:
            return 0
        except KeyboardInterrupt:  # that came when the answer had just ended, or drops a line
            if not terminal:
                raise
            print(f"\n[{HELP}]", file=sys.stderr)


def _answer(talk: Conversation, message: str, terminal: bool) -> None:
    """Prints an answer, and to stderr what the user should know of it."""
    before = len(talk.messages)
    try:
        why = talk.answer(message, show)
    except UserError as error:  # of this message: the model and the settings have been tried
        if not terminal:
            raise
        print(f"[{error}]", file=sys.stderr)
        return
    print(flush=True)
    if len(talk.messages) < before + 2:
        print("[the context is full: the oldest messages are forgotten]", file=sys.stderr)
    if why in WHY:
        print(f"[ended by {WHY[why]}]", file=sys.stderr)


WHY = {"length": "--max-new-tokens", "context": "the end of the context", "interrupt": "Ctrl-C"}
