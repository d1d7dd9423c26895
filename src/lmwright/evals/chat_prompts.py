"""Chat prompts: a user's message in the model's chat template, and where an answer to it ends.

prompt --template--> ids up to where the assistant begins --model--> answer --its end-->
"""

from collections.abc import Sequence
from dataclasses import replace

from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_ends import answer_end
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.sampling import Sampling


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
    end, token = answer_end(template, tokenizer)
    if token is not None:
        return settings, (token,)
    return (replace(settings, stop=(*settings.stop, end)) if end else settings), ()
