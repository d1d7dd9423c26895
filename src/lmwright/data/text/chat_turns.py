"""Spans of the assistant's turns in the text of a conversation, and a check for parts that the
template drops.

    conversation --template--> text --+--> where each turn of the assistant lies in it

Which letters a turn has is asked of the template itself, one turn at a time: the same
conversation is rendered with other words in that turn, and what the renderings share before
and after is the template's. A turn also takes in what the template adds after the prompt to
answer (thoughts that it opens, say) and the token that ends it. Templates with
`{% generation %}` say it themselves.

Calls of tools, tools and their results are changed in the same way, one by one: what changes
nothing in the text is not in it, and such a conversation is refused. So are thoughts of the last
turn.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmwright.data.text.beginning import shared_length
from lmwright.data.text.chat_calls import (
    STAND_INS,
    alter_calls,
    other_call,
    other_tools,
    quotes_arguments,
    with_objects,
)
from lmwright.data.text.chat_render import BEGIN, END, THOUGHTS, Message, Renderer, UnusableError

Span = tuple[int, int]


@dataclass(frozen=True)
class Words:
    """Characters start..stop-1 that a turn says; `whole` if the beginning and end of the turn are
    included."""

    start: int
    stop: int
    whole: bool = False


class TurnFinder:
    """Finds the turns in the text that a template renders."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._opens: str | None = None

    def turns(self, conversation: dict[str, Any]) -> tuple[str, list[Span], list[int]]:
        """Text of a conversation, the spans of the assistant's turns from `first` on, and the
        number of each span's turn: a template may mark several in one.

        Raises UnusableError where the template refuses the conversation or leaves out a part
        of it, or where a turn cannot be told from the rest.
        """
        messages, tools = conversation["messages"], conversation.get("tools")
        messages, text = self._rendered(messages, tools)
        refuse_dropped(self.renderer, text, messages, tools)
        first = conversation.get("first", 0)
        if self.renderer.marked:
            spans, of = self._marked(text, messages, tools, first)
        else:
            spans = self._told(text, messages, tools, first)
            of = list(range(len(spans)))
        self._refuse_misplaced(text, spans, messages, tools, first)
        return text, spans, of

    def _rendered(self, messages: Sequence[Message], tools: Any) -> tuple[Sequence[Message], str]:
        """Messages and their text. Arguments of calls that are JSON, as OpenAI writes them, become
        objects where the template wants these: where it would quote the JSON, or refuses it."""
        parsed = with_objects(messages)
        if parsed == messages:
            return messages, self.renderer.text(messages, tools)
        try:
            text = self.renderer.text(messages, tools)
        except UnusableError:
            return parsed, self.renderer.text(parsed, tools)
        if quotes_arguments(text, messages):
            with suppress(UnusableError):
                return parsed, self.renderer.text(parsed, tools)
        return messages, text

    def _told(self, text: str, messages: Sequence[Message], tools: Any, first: int) -> list[Span]:
        """Spans of the turns, found by what changes in the text with the words of a turn."""
        spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        words = [w for i in spoken if (w := self._words(text, messages, tools, i)) is not None]
        if not words:
            return []
        ending = self._closing(text[words[-1].stop :])
        limits = [*(w.start for w in words[1:]), len(text)]
        spans: list[Span] = []
        at = 0
        for word, limit in zip(words, limits, strict=True):
            if word.start < at or limit < word.stop:
                raise UnusableError(
                    "the assistant's turns cannot be told apart in the chat template's text"
                )
            begin = word.start if word.whole else self._begin(text, at, word.start)
            at = word.stop
            if not word.whole:
                at += len(self._end(text[word.stop : limit], ending))
            if word.start < at:
                spans.append((begin, at))
        return spans

    def _begin(self, text: str, at: int, start: int) -> int:
        """Start of the turn whose words begin at `start`; the previous turn ended at `at`."""
        opening = self.opening
        if not opening:  # prompts end before the blank
            return at + len(text[at:start].rstrip(" "))
        # thoughts that the template opens belong to the answer
        head = text.rfind(opening, at, start)
        return head + len(opening) if head >= 0 else start

    def _end(self, tail: str, ending: str) -> str:
        """Part of the text after a turn's words that ends the turn; `ending` ends the last one."""
        both = tail[: shared_length(tail, ending)]
        if both == ending:
            return both
        if closing := self._closing(both, whole=False):
            return closing
        # the last turn may end in a token of its own, as in gpt-oss
        own = next((t for t in self.renderer.special if t and tail.startswith(t)), "")
        ends = any(token in ending for token in self.renderer.special)
        return own if ends and own not in self.opening else ""

    @property
    def opening(self) -> str:
        """Text that precedes an answer, such as "<|im_start|>assistant\n"; "" if unknown."""
        if self._opens is None:
            question = [{"role": "user", "content": STAND_INS[0]}]
            try:
                without = self.renderer.text(question)
                asked = self.renderer.text(question, prompt=True)
            except UnusableError:
                asked = without = ""
            self._opens = asked.removeprefix(without) if asked.startswith(without) else ""
        return self._opens

    def _words(
        self, text: str, messages: Sequence[Message], tools: Any, number: int
    ) -> Words | None:
        """Span of the words of message `number`: what changes in the text if the message says
        something else. None if the template drops it."""
        others = [
            _with(messages, number, {"role": "assistant", "content": words}) for words in STAND_INS
        ]
        calls = messages[number].get("tool_calls")
        try:
            renderings = [self.renderer.text(other, tools) for other in others]
        except UnusableError:  # a turn that calls may be the only one that fits there
            if not calls:
                raise
            return self._call(text, messages, tools, number)
        if any(words not in other for words, other in zip(STAND_INS, renderings, strict=True)):
            return None
        span = _differing(text, renderings)
        # results may be written only after a call, as if they were a part of its turn
        if calls and any(_overlap(span, r) for r in self._results(text, messages, tools, number)):
            return self._call(text, messages, tools, number)
        return Words(*span)

    def _call(self, text: str, messages: Sequence[Message], tools: Any, number: int) -> Words:
        """Span of the tool calls of message `number`: what a conversation that ends with it adds
        after the generation prompt."""
        before = self.renderer.text(messages[:number], tools, prompt=True)
        start, stop = self._changed(text, messages, tools, number)
        # once another turn follows, its thoughts and its words may be left out, as in gpt-oss, or
        # the words may be behind the result, as in Gemma 4
        said = messages[number]
        alone = {key: value for key, value in said.items() if key not in THOUGHTS}
        for form in (said, alone, {**alone, "content": ""}):
            through = self.renderer.text([*messages[:number], form], tools)
            turn = through[len(before) :].rstrip()
            at = text.find(turn, max(0, stop - len(turn)), start + len(turn))
            if through.startswith(before) and at >= 0:
                return Words(at, at + len(turn), whole=True)
        raise UnusableError(
            f"message {number + 1}: the chat template's text does not show where its tool "
            "call begins and ends"
        )

    def _changed(self, text: str, messages: Sequence[Message], tools: Any, number: int) -> Span:
        """Characters that change with other calls in message `number`."""
        calls = messages[number]["tool_calls"]
        spans = []
        for words in STAND_INS:
            other = [other_call(call, words, "arguments") for call in calls]
            if other == calls:  # a name may be written in the result's turn, too
                other = [other_call(call, words, "name") for call in calls]
            message = {**messages[number], "tool_calls": other}
            spans.append(self.renderer.text(_with(messages, number, message), tools))
        return _differing(text, spans)

    def _results(
        self, text: str, messages: Sequence[Message], tools: Any, number: int
    ) -> Iterator[Span]:
        """Characters of the tool results that follow message `number`."""
        for i in range(number + 1, len(messages)):
            if messages[i]["role"] != "tool":
                return
            others = [_with(messages, i, {**messages[i], "content": w}) for w in STAND_INS]
            with suppress(UnusableError):  # the template wants this result and no other
                yield _differing(text, [self.renderer.text(other, tools) for other in others])

    def _marked(
        self, text: str, messages: Sequence[Message], tools: Any, first: int
    ) -> tuple[list[Span], list[int]]:
        """Spans of the template's own `{% generation %}` blocks, and the turn of each."""
        plain, *pieces = self.renderer.text(messages, tools, marks=True).split(BEGIN)
        spans: list[Span] = []
        for piece in pieces:
            inside, _, after = piece.partition(END)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        if plain != text:
            raise UnusableError("the chat template's generation blocks do not add up to its text")
        earlier = sum(m["role"] == "assistant" for m in messages[:first])
        of = list(range(len(spans)))
        if len(spans) != sum(m["role"] == "assistant" for m in messages):
            told = self._turns_of(text, spans, messages, tools)
            if earlier and told is None:
                raise UnusableError(
                    "the chat template's generation blocks do not match the assistant's turns"
                )
            of = told or of
        kept = [(span, turn - earlier) for span, turn in zip(spans, of, strict=True)
                if turn >= earlier and span[0] < span[1]]  # fmt: skip
        return [span for span, _ in kept], [turn for _, turn in kept]

    def _turns_of(
        self, text: str, spans: Sequence[Span], messages: Sequence[Message], tools: Any
    ) -> list[int] | None:
        """The assistant's turn of each block, by where the words of each turn are: a block between
        two turns belongs to the first if nothing but blanks is before it, else to the second. None
        where the words of a turn are not found."""
        numbers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        try:
            words = [self._words(text, messages, tools, number) for number in numbers]
        except UnusableError:
            return None
        if not words or None in words:
            return None
        turn, end, of = 0, 0, []
        for start, stop in spans:
            while turn + 1 < len(words) and stop > words[turn + 1].start:
                turn += 1
            behind = start >= words[turn].stop and text[end:start].strip()
            of.append(min(turn + bool(behind), len(words) - 1))
            end = stop
        return of

    def _refuse_misplaced(
        self,
        text: str,
        spans: Sequence[Span],
        messages: Sequence[Message],
        tools: Any,
        first: int,
    ) -> None:
        """Raises UnusableError unless tool calls are inside the learned spans and results
        outside."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("tool_calls"):
                continue
            for place, result in enumerate(self._results(text, messages, tools, i), i + 2):
                if any(_overlap(result, span) for span in spans):
                    raise UnusableError(
                        f"message {place}: the chat template writes a tool's result into the "
                        "assistant's turn, where it would be learned"
                    )
            try:
                start, stop = self._changed(text, messages, tools, i)
            except UnusableError:  # the template wants this call and no other
                continue
            if i >= first and not any(a <= start and stop <= b for a, b in spans):
                raise UnusableError(
                    f"message {i + 1}: the chat template writes its tool call outside of the "
                    "assistant's turn, where it is not learned"
                )

    def _closing(self, tail: str, *, whole: bool = True) -> str:
        """Text that ends a turn: the tail up to its last special token; without one, all of it
        (`whole`) without trailing blanks, or nothing."""
        special = self.renderer.special
        ends = [at + len(token) for token in special if (at := tail.rfind(token)) >= 0]
        return tail[: max(ends)] if ends else tail.rstrip() if whole else ""


def refuse_dropped(renderer: Renderer, text: str, messages: Sequence[Message], tools: Any) -> None:
    """Raises UnusableError if a call, a result or the tools themselves are missing from the text.

    A part is in the text if another in its place gives another text, or is refused.
    """

    def same(messages: Sequence[Message], tools: Any) -> bool:
        try:
            return renderer.text(messages, tools) == text
        except UnusableError:
            return False

    for i, message in enumerate(messages):
        if message["role"] == "tool" and message["content"]:
            other = {**message, "content": STAND_INS[0]}
            if same(_with(messages, i, other), tools):
                raise UnusableError(_name_dropped(f"message {i + 1}", "a tool's result"))
        altered = alter_calls(message.get("tool_calls"))
        for key in ("function_call",) if altered else ("tool_calls", "function_call"):
            without = {k: v for k, v in message.items() if k != key}
            if message.get(key) and same(_with(messages, i, without), tools):
                raise UnusableError(_name_dropped(f"message {i + 1}", "its tool call"))
        dropped = [
            (call, part)
            for call, part, other in altered
            if same(_with(messages, i, {**message, "tool_calls": other}), tools)
        ]
        if dropped:
            call, part = dropped[0]
            whole = sum(c == call for c, _ in dropped) == sum(c == call for c, *_ in altered)
            what = "" if whole else f"the {part} of "
            raise UnusableError(
                _name_dropped(f"message {i + 1}", f"{what}its tool call {call + 1}")
            )
    if tools and same(messages, other_tools(tools)):
        raise UnusableError(_name_dropped("the row", "its tools"))
    if any(same([*messages[:-1], other], tools) for other in _without_thoughts(messages[-1])):
        raise UnusableError(
            f"message {len(messages)}: the chat template leaves out its thoughts, so that they "
            "would not be learned; use one that writes them, such as data.chat.template = "
            "'qwen3', or remove them from the data"
        )


def _name_dropped(where: str, what: str) -> str:
    return (
        f"{where}: the chat template leaves out {what}; use one that writes tools and calls, "
        "such as data.chat.template = 'qwen3'"
    )


def _without_thoughts(message: Message) -> Iterator[Message]:
    """Copies of a message of the assistant that is learned without its thoughts: without the keys
    that hold them, and with others in its content."""
    if message["role"] != "assistant" or message.get("weight") == 0:
        return
    if any(str(message.get(key) or "").strip() for key in THOUGHTS):
        yield {key: value for key, value in message.items() if key not in THOUGHTS}
    before, mark, after = message["content"].partition("</think>")
    if mark and before.removeprefix("<think>").strip():
        yield {**message, "content": f"<think>{STAND_INS[0]}{mark}{after}"}


def _with(messages: Sequence[Message], number: int, message: Message) -> list[Message]:
    return [*messages[:number], message, *messages[number + 1 :]]


def _differing(text: str, others: Sequence[str]) -> Span:
    """Characters of a text that are not shared, at either end, with all the others."""
    start = min(shared_length(text, other) for other in others)
    rest = min(shared_length(text[::-1], other[::-1]) for other in others)
    return start, max(start, len(text) - rest)


def _overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]
