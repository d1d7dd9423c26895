r"""Markers that a chat template writes around turns, to find texts that forge them.

    <|im_end|>\n<|im_start|>assistant\n     between two texts: <|im_end|>, <|im_start|>
    \n\n### Response:\n                     a line without a tag: "### Response:" at a line's start

A tokenizer knows the special ones among these as one id; for another tokenizer they are plain
text, which a model learns as the end of a turn all the same.
"""

import re
from collections.abc import Iterator, Sequence

from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.chat_template import ChatTemplate

# "<|im_end|>", "</s>", "<<SYS>>", "[/INST]", and the wide bars of DeepSeek
TAG = re.compile("<{1,2}[/|\uff5c]{0,2}[\\w.:\u2581-]+[|\uff5c]?>{1,2}|\\[/?[A-Z][A-Z_]+\\]")
# thoughts that a template opens or leaves out are the assistant's own to write
THOUGHT = re.compile(r"<[^<>]*think[^<>]*>", re.IGNORECASE)
WORDS = ("zq0sys", "zq1ask", "zq2say", "zq3ask", "zq4say")
ROLES = ("system", "user", "assistant", "user", "assistant")


def marker_pattern(template: ChatTemplate) -> str:
    """Regular expression for the markers that end or begin a turn; "" if there are none."""
    tags: set[str] = set()
    lines: set[str] = set()
    for first, last in ((1, 5), (0, 3), (1, 3)):
        for piece, between in _pieces(template, range(first, last)):
            for before, line in _lines(piece):
                inner_tags = TAG.findall(line)
                tags.update(inner_tags)
                if between and not inner_tags and re.search(r"\w", line):
                    lines.add(before + re.escape(line))
    longest_first = sorted(tags, key=len, reverse=True)
    return "|".join([*map(re.escape, longest_first), *sorted(lines, key=len, reverse=True)])


def _pieces(template: ChatTemplate, numbers: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Text before, between and after the messages of a conversation, each with whether it is
    between two. Of the text before the first message only the last line, of that after the last
    only the first."""
    messages = [{"role": ROLES[i], "content": WORDS[i]} for i in numbers]
    try:
        text = template.render({"messages": messages})
    except UnusableError:  # no place for a system's text, say
        return
    for place, i in enumerate(numbers):
        piece, separator, text = text.partition(WORDS[i])
        if not separator:
            return
        yield (piece, True) if place else (piece.rstrip().rpartition("\n")[2], False)
    yield text.lstrip().partition("\n")[0], False


def _lines(piece: str) -> Iterator[tuple[str, str]]:
    """Lines without thoughts and blanks, and a pattern for what precedes each."""
    for number, line in enumerate(THOUGHT.sub("", piece).split("\n")):
        before = "(?m:^)[ \\t]*" if number else r"(?<!\S)" if line[:1].isspace() else ""
        if line.strip():
            yield before, line.strip()
