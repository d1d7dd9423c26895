"""Ends: how conversations begin, and how answers end, in a tokenizer's own chat template."""

from datetime import date

from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError

ANSWER = "ok"  # of a conversation that shows what the template writes around it


def own_template(tokenizer: TextTokenizer) -> ChatTemplate | None:
    """The tokenizer's chat template; None where it has none that can be used."""
    if not tokenizer.chat_template:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer, date.today().isoformat())
    except UserError:
        return None


def answer_end(template: ChatTemplate, tokenizer: TextTokenizer) -> tuple[str, int | None]:
    """Text that the template writes behind an answer, without blanks, and its id if it is one
    special token; empty and None where the template shows nothing."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        turns = template.turns({"messages": said})
    except UnusableError:
        return "", None
    end = turns.last.rpartition(ANSWER)[2].strip()
    if not end:
        return "", None
    first, *_ = tokenizer.encode(end, parse_special=True)
    return end, first if first in tokenizer.special_tokens.values() else None


def end_ids(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The id that ends an answer in the tokenizer's chat template, if it is one special token."""
    template = own_template(tokenizer)
    end = None if template is None else answer_end(template, tokenizer)[1]
    return () if end is None else (end,)


def begins_with_bos(tokenizer: TextTokenizer) -> bool:
    """True for a tokenizer whose chat template writes its bos before a conversation."""
    if (template := own_template(tokenizer)) is None:
        return False
    said = {"role": "user", "content": "?", "instruction": "?", "input": ""}
    try:
        text = template.render({"messages": [said, {"role": "assistant", "content": ANSWER}]})
    except UnusableError:
        return False
    ids = tokenizer.encode(text, parse_special=True)
    return tokenizer.bos_id is not None and list(ids[:1]) == [tokenizer.bos_id]
