"""Chat prompts: messages in the model's chat template, and where an answer to them ends.

prompt --template--> ids up to where the assistant begins --model--> answer --its end-->
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_ends import answer_end
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.sampling import Sampling
from lmwright.formats.loaded import LoadedModel

Message = Mapping[str, Any]
"""A `role` and a `content`, as in a chat template's messages."""
Chat = str | Sequence[Message]
"""A user's message, or a conversation that ends with one."""


CHANNELS = {"<|channel|>", "<|message|>"}
CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|start|call|return)\|>|$)", re.S
)


class RefusedError(UserError):
    """A chat template refuses a prompt."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.reason = reason


def own_template(loaded: LoadedModel, cure: str) -> ChatTemplate:
    """The chat template of a model's tokenizer, with the date of today. Raises UserError, with
    this cure, where there is none."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        raise UserError(f"{loaded.path}: its tokenizer has no chat template; {cure}")
    today, where = date.today().isoformat(), f"{loaded.path}: chat template"
    return ChatTemplate(tokenizer.chat_template, tokenizer, today, where)


def encode_chats(
    prompts: Sequence[Chat], template: ChatTemplate, tokenizer: TextTokenizer, field: str,
    tools: Any = None,
) -> list[list[int]]:  # fmt: skip
    """Ids of each conversation, up to where the assistant begins. Raises RefusedError for one of a
    `field` that the template does not take, or whose `tools` it leaves out."""
    asked = []
    for prompt in prompts:
        told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat: dict[str, Any] = {"messages": [_whole(each) for each in told]}
        try:
            text = template.render({**chat, "tools": tools} if tools else chat, prompt=True)
            if tools and text == template.render(chat, prompt=True):
                raise UnusableError("the chat template leaves out its tools")
        except UnusableError as error:
            raise RefusedError(f"{field}: {prompt!r}", str(error)) from None
        try:
            text.encode()
        except UnicodeEncodeError:  # Python's form of bytes that are no UTF-8
            raise RefusedError(field, "is not UTF-8 text; save it as UTF-8") from None
        asked.append(tokenizer.encode(text, parse_special=True))
    return asked


def answer_of(tokenizer: TextTokenizer, tokens: Sequence[int] | None, text: str) -> dict[str, str]:
    """The assistant's message of an answer; `tokens` are None of one that was interrupted. Where it
    is written in channels, as by gpt-oss, its last one is the content, as templates want it."""
    if not tokenizer.special_tokens.keys() >= CHANNELS:
        return {"role": "assistant", "content": text}
    if tokens is None:  # the text is without special tokens
        return {"role": "assistant", "content": text.partition("assistantfinal")[2]}
    said = CHANNEL.findall(tokenizer.decode(tokens))
    thought = "".join(words for name, words in said if name == "analysis")
    final = "".join(words for name, words in said if name == "final") if said else text
    return {"role": "assistant", "content": final} | ({"thinking": thought} if thought else {})


def _whole(message: Message) -> dict[str, Any]:
    """A message with the fields of templates for instructions, and without those that are null, as
    in transformers: columnar files fill in every key that any row has."""
    said = {key: value for key, value in message.items() if value is not None}
    if message.get("role") != "user":
        return said
    return {"instruction": said.get("content"), "input": "", **said}


def ending_answers(
    settings: Sampling, template: ChatTemplate, tokenizer: TextTokenizer
) -> tuple[Sampling, tuple[int, ...]]:
    """Settings that also stop at what the template writes behind an answer, and its id where it is
    one special token."""
    end, token = answer_end(template, tokenizer)
    if token is not None:
        return settings, (token,)
    return (replace(settings, stop=(*settings.stop, end)) if end else settings), ()
