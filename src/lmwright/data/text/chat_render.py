"""One chat template, compiled and rendered as transformers does, without any limits.

Templates come from strangers: `chat_child.py` runs this module in a process of its own, so it
imports little beyond the standard library and, when a template is compiled, Jinja.
"""

import datetime
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lmwright.errors import first_line

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Marks around a generation block.
BEGIN, END = "\ue000\ue001", "\ue001\ue000"

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of messages for what the assistant thought before it said something; the first counts."""


class UnusableError(Exception):
    """A row that cannot be learned from; the text says why."""


class NoTemplateError(Exception):
    """A source that is not Jinja; the text says why."""


class Renderer:
    """Template with the special tokens that it may use; `date` is the result of `strftime_now`.

    Raises NoTemplateError for a source that is not Jinja.
    """

    def __init__(
        self, source: str, special: Sequence[str], roles: dict[str, str], date: str | None
    ):
        self.special, self.roles = tuple(special), roles
        self.marked = bool(GENERATION.search(source))
        self._plain = _compiled(source, date, marks=False)
        self._with_marks = _compiled(source, date, marks=True) if self.marked else self._plain

    def text(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> str:
        """Messages as text. With `prompt` it ends where the assistant would begin; with `marks`,
        BEGIN and END enclose the content of each generation block.

        Raises UnusableError where the template refuses them.
        """
        render = self._with_marks if marks else self._plain
        try:
            return render(
                messages=[_with_thoughts(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.roles,
            )
        except MemoryError:
            raise
        except RecursionError:
            raise UnusableError("the chat template refuses it: it recurses too deeply") from None
        except Exception as e:  # templates raise what they like
            raise UnusableError(f"the chat template refuses it: {_why(e)}") from None


def _with_thoughts(message: Message) -> Message:
    """A message whose thoughts have the names that templates read: most want `reasoning_content`,
    gpt-oss's and others `thinking`."""
    thoughts = next((t for key in THOUGHTS if (t := message.get(key)) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _compiled(source: str, date: str | None, *, marks: bool) -> Callable[..., str]:
    """Template compiled in the environment that transformers provides."""
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
    except MemoryError:
        raise
    except RecursionError:
        raise NoTemplateError("it is nested too deeply") from None
    except Exception as e:  # Jinja's own errors, and Python's of the code that it writes
        raise NoTemplateError(first_line(e)[:200]) from None


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


def _why(error: Exception) -> str:
    reason = first_line(error)[:200]
    if "strftime_now" in reason:
        return 'it asks for today\'s date; set data.chat.date, as in "2025-01-31"'
    return reason
