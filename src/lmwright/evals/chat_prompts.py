"""Chat prompts: a user's message in the model's chat template, and where an answer to it ends.

prompt --template--> ids up to where the assistant begins --model--> answer --its end-->
"""

from collections.abc import Sequence
from dataclasses import replace

from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.sampling import Sampling

ANSWER = "ok"  # of a conversation that shows what the template writes behind it


def encode_chats(
    prompts: Sequence[str], template: ChatTemplate, tokenizer: TextTokenizer, field: str
) -> list[list[int]]:
    """Ids of each prompt as a user's message, up to where the assistant begins. Raises UserError
    for a prompt of a `field` that the template refuses."""
    asked = []
    for prompt in prompts:
        user = {"role": "user", "content": prompt, "instruction": prompt, "input": ""}
        try:
            text = template.render({"messages": [user]}, prompt=True)
        except UnusableError as error:
            raise UserError(f"{field}: {prompt!r}: {error}") from None
        asked.append(tokenizer.encode(text, parse_special=True))
    return asked


def ending_answers(
    settings: Sampling, template: ChatTemplate, tokenizer: TextTokenizer
) -> tuple[Sampling, tuple[int, ...]]:
    """Settings that also stop at what the template writes behind an answer, and its id where it is
    one special token."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        turns = template.turns({"messages": said})
    except UnusableError:
        return settings, ()
    turn = turns.text[slice(*turns.turns[-1])] if turns.turns else ""
    end = turn.rpartition(ANSWER)[2].strip()
    if not end:
        return settings, ()
    first, *_ = tokenizer.encode(end, parse_special=True)
    if first in tokenizer.special_tokens.values():
        return settings, (first,)
    return replace(settings, stop=(*settings.stop, end)), ()
