"""Chat templates: Jinja that turns a conversation into text, rendered as transformers does.

    conversation --template--> text --+--> where each turn of the assistant lies in it

Which letters a turn has is asked of the template itself, one turn at a time: the same
conversation is rendered with other words in that turn, and what the renderings share before
and after is the template's. A turn also takes in what the template adds after the prompt to
answer (thoughts that it opens, say) and the token that ends it. Templates with
`{% generation %}` say it themselves.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmwright.data.chat import UnusableError
from lmwright.data.tokenizer import ROLES, TextTokenizer
from lmwright.errors import UserError
from lmwright.run import Chat

FOLDER = Path(__file__).parent / "templates"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Marks around a generation block, and two stand-ins for what is said: neither begins or
# ends as the other does, so that one of them shows where the words differ.
BEGIN, END = "\ue000\ue001", "\ue001\ue000"
STAND_INS = ("Xq5vJr7Wk", "7hZk2pN4b")

Span = tuple[int, int]


@dataclass(frozen=True)
class Turns:
    """A rendered conversation: `turns` are spans of letters, one for each turn of the assistant
    that may be learned, in order."""

    text: str
    turns: tuple[Span, ...]


class ChatTemplate:
    """A template and the special tokens that it may name.

    `source` is Jinja; it runs in a sandbox. `date` is what `strftime_now` tells. Raises
    UserError for a source that is not Jinja.
    """

    def __init__(self, source: str, tokenizer: TextTokenizer, date: str | None = None):
        self.source = source
        self.special = tokenizer.special_tokens
        self.roles = {f"{r}_token": t for r in ROLES if (t := getattr(tokenizer, r)) is not None}
        self.marked = bool(GENERATION.search(source))
        self._plain = _compiled(source, date, marks=False)
        self._with_marks = _compiled(source, date, marks=True)

    def render(self, conversation: dict[str, Any], *, prompt: bool = False) -> str:
        """The text; with `prompt` it ends where the assistant would begin.

        Raises UnusableError where the template refuses the conversation.
        """
        return self._text(conversation["messages"], conversation, prompt=prompt)

    def _text(
        self,
        messages: Sequence[Any],
        conversation: dict[str, Any],
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> str:
        render = self._with_marks if marks else self._plain
        try:
            return render(
                messages=list(messages),
                tools=conversation.get("tools"),
                documents=None,
                add_generation_prompt=prompt,
                **self.roles,
            )
        except Exception as e:  # templates raise what they like
            raise UnusableError(f"the chat template refuses it: {_first(e)}") from None

    def turns(self, conversation: dict[str, Any]) -> Turns:
        """The text and the assistant's turns from `first` on.

        Raises UnusableError where the template refuses it, or where a turn cannot be told
        from the rest.
        """
        messages, first = conversation["messages"], conversation.get("first", 0)
        if self.marked:
            return self._marked_turns(conversation)
        text = self.render(conversation)
        spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        words = [span for i in spoken if (span := self._words(text, conversation, i)) is not None]
        if not words:
            return Turns(text, ())
        ending = _closing(text[words[-1][1] :], self.special)
        spans: list[Span] = []
        at = 0
        for (start, stop), limit in zip(
            words, [*(w[0] for w in words[1:]), len(text)], strict=True
        ):
            if start < at or limit < stop:
                raise UnusableError("the chat template mixes the assistant's turns")
            # thoughts that the template opens belong to the answer
            head = text.rfind(self._opening, at, start) if self._opening else -1
            begin = head + len(self._opening) if head >= 0 else start
            if not self._opening:  # prompts end before the blank
                begin = at + len(text[at:start].rstrip(" "))
            tail = text[stop:limit]
            shared = tail[: _shared(tail, ending)]
            if shared != ending:
                shared = _closing(shared, self.special, whole=False)
            at = stop + len(shared)
            if start < at:
                spans.append((begin, at))
        return Turns(text, tuple(spans))

    @functools.cached_property
    def _opening(self) -> str:
        """What comes before an answer, such as "<|im_start|>assistant\\n"; "" if not known."""
        question = [{"role": "user", "content": STAND_INS[0]}]
        try:
            without = self._text(question, {})
            asked = self._text(question, {}, prompt=True)
        except UnusableError:
            return ""
        return asked.removeprefix(without) if asked.startswith(without) else ""

    def _words(self, text: str, conversation: dict[str, Any], number: int) -> Span | None:
        """Where message `number` speaks: what changes in the text if it says something else.
        None where the template leaves it out."""
        messages = conversation["messages"]
        start, rest = len(text), len(text)
        for words in STAND_INS:
            other = {"role": "assistant", "content": words}
            found = self._text([*messages[:number], other, *messages[number + 1 :]], conversation)
            if words not in found:
                return None
            start = min(start, _shared(text, found))
            rest = min(rest, _shared(text[::-1], found[::-1]))
        return start, max(start, len(text) - rest)

    def _marked_turns(self, conversation: dict[str, Any]) -> Turns:
        """What the template's own `{% generation %}` blocks hold."""
        messages, first = conversation["messages"], conversation.get("first", 0)
        text = self.render(conversation)
        plain, *pieces = self._text(messages, conversation, marks=True).split(BEGIN)
        spans: list[Span] = []
        for piece in pieces:
            inside, _, after = piece.partition(END)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        if plain != text:
            raise UnusableError("the chat template nests or uses its generation blocks")
        earlier = sum(m["role"] == "assistant" for m in messages[:first])
        if earlier and len(spans) != sum(m["role"] == "assistant" for m in messages):
            raise UnusableError("the chat template's generation blocks are not its turns")
        return Turns(text, tuple(span for span in spans[earlier:] if span[0] < span[1]))


def template_source(chat: Chat, tokenizer: TextTokenizer) -> str:
    """Jinja source of the template that a run asks for. Raises UserError where it is not there."""
    choices = f"{', '.join(BUILT_IN)}, none, or a Jinja file"
    if chat.template == "none":
        return PLAIN
    if chat.template in BUILT_IN:
        source = (FOLDER / f"{chat.template}.jinja").read_text("utf-8")
        for role in ("bos_token", "eos_token"):
            if role in source and getattr(tokenizer, role.removesuffix("_token")) is None:
                raise UserError(
                    f"data.chat.template: {chat.template} needs the tokenizer's {role}, and it "
                    "has none; name it in tokenizer_config.json or choose another template"
                )
        return source
    if chat.template == "tokenizer":
        if not tokenizer.chat_template:
            raise UserError(
                "data.chat.template: the tokenizer has no chat template of its own; choose one: "
                f"{choices}"
            )
        return tokenizer.chat_template
    try:
        return Path(chat.template).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "not UTF-8"
        raise UserError(
            f"data.chat.template: {chat.template} cannot be read ({reason}); choose one: "
            f"tokenizer, {choices}"
        ) from None


@functools.lru_cache(8)
def _compiled(source: str, date: str | None, *, marks: bool) -> Callable[..., str]:
    """The template in the environment that transformers gives it."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(marks), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    if date is not None:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(date).strftime
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as e:
        raise UserError(
            f"data.chat.template: it is not a Jinja template ({_first(e)}); mend it or choose "
            "another"
        ) from None


def _generation_blocks(marks: bool) -> type:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        """`{% generation %}...{% endgeneration %}` around what a model is to say."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}" if marks else caller()

    return GenerationBlocks


def _raise(message: str) -> None:
    raise UnusableError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _closing(tail: str, special: dict[str, int], *, whole: bool = True) -> str:
    """What ends a turn: the tail up to its last special token; if it has none, the `whole` of
    it without the blanks behind, or nothing."""
    ends = [at + len(token) for token in special if (at := tail.rfind(token)) >= 0]
    return tail[: max(ends)] if ends else tail.rstrip() if whole else ""


def _shared(a: str, b: str) -> int:
    """Letters at the beginning that two texts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
