"""Columns as data sets call them, and the kinds of rows that they may be.

names of columns --source_fields--> ways to read its rows, the likeliest first
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmwright.config.rows import ANSWERED, LABELED, RELATED, ROW_PARTS, TAGGED

TEXTS = ("text", "sentence", "content", "review", "comment", "tweet")
LABELS = ("label", "labels", "sentiment")
PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
         ("text", "text_pair"), ("text1", "text2"))  # fmt: skip
AMOUNT = "score"
"""Name of a column whose numbers are amounts, whatever they are."""
PAIR_LABELS = (*LABELS, "gold_label", AMOUNT)
CHATS = ("messages", "conversations", "conversation")
ASKED = (
    ("question", "answer"), ("prompt", "response"),
    ("instruction", "response"), ("query", "response"), ("query", "answer"),
    ("question", "response"),
    ("input", "output"), ("input", "target"), ("problem", "solution"),
)  # fmt: skip
KINDS: dict[str, list[dict[str, str]]] = {
    "preference": [
        {},
        *({"prompt": name} for name in (*CHATS, "question", "instruction", "input", "query")),
    ],
    "rated": [
        {},
        *({"prompt": asked, "completion": answer} for asked, answer in ASKED),
        *({"completion": chat} for chat in CHATS),
    ],
    ANSWERED: [{}],
    "alpaca": [
        {"input": "context", "output": "response"}, {"input": "context"}, {},
        {"output": "response"},
        {"instruction": "question", "input": "context", "output": "answer"},
    ],
    "sharegpt": [{"conversations": chat} for chat in ("conversations", "conversation", "messages")],
    "messages": [{"messages": chat} for chat in CHATS],
    "prompt": [{}, *({"prompt": asked, "completion": answer} for asked, answer in ASKED)],
    TAGGED: [
        {"tokens": words, "tags": tags}
        for words in ("tokens", "words")
        for tags in ("tags", "ner_tags", "ner", "labels", "pos_tags", "upos", "pos")
    ],
    RELATED: [{}, {"anchor": "query"}, {"anchor": "question"}],
    LABELED: [
        *(
            {"text": first, "text_pair": second, "label": label}
            for first, second in PAIRS
            for label in PAIR_LABELS
        ),
        *(
            {"text": text, "label": label}
            for text in TEXTS
            for label in LABELS
        ),
    ],
}  # fmt: skip
"""Kinds of rows, those first whose columns hold those of another, and the names of their parts."""
OPTIONAL = {"system": ("system", "system_prompt")}
"""Names of parts that a row may have."""
ASKED_TOO = ("instruction", "input", "context", "passage", "choices", "options", "a")
"""Columns that belong to what is asked; of such rows, only `alpaca` takes two."""
TEXT_COLUMNS = (*TEXTS, "body", "document", "article", "raw_content", "code")


def source_fields(kind: str | None, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Fields of a source of a kind, or of any, that has these columns, whatever the case of their
    letters."""
    known = {name.strip().casefold(): name for name in reversed(names)}
    for rows, several in KINDS.items():
        for given in several if kind in (None, rows) else ():
            columns = _columns(rows, given, known)
            if columns is not None:
                yield {"rows": rows, "columns": {k: v for k, v in columns.items() if k != v}}
    for name in TEXT_COLUMNS if kind in (None, "text") else ():
        if name in known:
            yield {"text_column": known[name]}
    if kind == LABELED and AMOUNT in known:  # beside texts alone it may be their quality
        for name in TEXTS:
            if name in known:
                yield {"rows": LABELED, "columns": {"text": known[name], "label": known[AMOUNT]}}


def _columns(
    rows: str, given: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str] | None:
    """The column of each part of a kind of rows; None if one is not there, or if what is asked is
    not all of it."""
    needed, optional, _ = ROW_PARTS[rows]
    wanted = {name: name for name in needed} | given
    if any(name not in known for name in wanted.values()):
        return None
    for part in optional:
        names = OPTIONAL.get(part, (part,))
        found = next((name for name in names if name in known), None)
        if found is not None:
            wanted.setdefault(part, found)
    used = wanted.values()
    if "prompt" in given and any(name in known and name not in used for name in ASKED_TOO):
        return None
    return {part: known[name] for part, name in wanted.items()}
