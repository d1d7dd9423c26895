"""Chat templates: Jinja that turns a conversation into text, rendered as transformers does.

    conversation --template--> text --+--> where each turn of the assistant lies in it

A template is rendered in a process of its own (`chat_child.py`), which has a limit on time and
memory; how turns are found is in `chat_turns.py`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmwright.config.run import Chat
from lmwright.data.text.chat_child import CHILD, LimitError
from lmwright.data.text.chat_render import NoTemplateError, UnusableError
from lmwright.data.tokens.tokenizer import ROLES, TextTokenizer
from lmwright.errors import UserError

FOLDER = Path(__file__).parent / "templates"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
MAX_STRIKES = 3
"""Number of conversations that exceed the limits before the template is refused."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Turns:
    """Rendered conversation: `turns` are character spans of the assistant's turns that may be
    learned, in order; `of` is the number of each span's turn."""

    text: str
    turns: tuple[Span, ...]
    of: tuple[int, ...]

    @property
    def last(self) -> str:
        """Text of the last turn."""
        spans = zip(self.turns, self.of, strict=True)
        return "".join(self.text[a:b] for (a, b), turn in spans if turn == self.of[-1])


class ChatTemplate:
    """Template with the special tokens that it may use.

    `source` is Jinja; it runs in a sandbox, in a process of its own. `date` is what
    `strftime_now` tells, `where` names the template in messages. Raises UserError for a source
    that is not Jinja.
    """

    def __init__(
        self,
        source: str,
        tokenizer: TextTokenizer,
        date: str | None = None,
        where: str = "data.chat.template",
    ):
        self.source, self.where = source, where
        roles = {f"{r}_token": t for r in ROLES if (t := getattr(tokenizer, r)) is not None}
        special = list(tokenizer.special_tokens)
        self._spec = json.dumps(
            {"source": source, "special": special, "roles": roles, "date": date}
        )
        self._strikes = 0
        try:
            CHILD.ask(self._spec, {"op": "compile"})
        except NoTemplateError as e:
            raise UserError(
                f"{where}: not a Jinja template ({e}); correct it or choose another"
            ) from None
        except LimitError as e:
            raise UserError(f"{where}: {e}; correct it or choose another") from None

    def render(self, conversation: dict[str, Any], *, prompt: bool = False) -> str:
        """Text of a conversation; with `prompt` it ends where the assistant would begin.

        Raises UnusableError where the template refuses the conversation.
        """
        return self._ask("text", conversation, prompt=prompt)["text"]

    def turns(self, conversation: dict[str, Any]) -> Turns:
        """Text of a conversation and the assistant's turns from `first` on.

        Raises UnusableError where the template refuses the conversation, leaves out its tools,
        a call or a result, or where a turn cannot be told from the rest.
        """
        answer = self._ask("turns", conversation)
        return Turns(answer["text"], tuple((a, b) for a, b in answer["turns"]), tuple(answer["of"]))

    def _ask(self, op: str, conversation: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked = {k: v for k, v in conversation.items() if k in ("messages", "tools", "first")}
        try:
            return CHILD.ask(self._spec, {"op": op, "conversation": asked, **more})
        except LimitError as e:
            self._strikes += 1
            if self._strikes >= MAX_STRIKES:
                raise UserError(
                    f"{self.where}: {e}, repeatedly; correct it or choose another"
                ) from None
            raise UnusableError(str(e)) from None


def chosen_template(chat: Chat, tokenizer: TextTokenizer) -> ChatTemplate:
    """Template that a run asks for. Raises UserError if it does not exist or is not Jinja."""
    return ChatTemplate(template_source(chat, tokenizer), tokenizer, chat.date)


def template_source(chat: Chat, tokenizer: TextTokenizer) -> str:
    """Jinja source of the template that a run asks for. Raises UserError if it does not exist."""
    choices = f"{', '.join(BUILT_IN)}, none, or a Jinja file"
    if chat.template == "none":
        return PLAIN
    if chat.template in BUILT_IN:
        source = (FOLDER / f"{chat.template}.jinja").read_text("utf-8")
        for role in ("bos_token", "eos_token"):
            if role in source and getattr(tokenizer, role.removesuffix("_token")) is None:
                raise UserError(
                    f"data.chat.template: {chat.template} needs the tokenizer's {role}, which is "
                    "not set; add it to tokenizer_config.json, or choose another template"
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
