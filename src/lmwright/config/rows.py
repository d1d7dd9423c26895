"""Kinds of rows that a source may hold, by their parts."""

LABELED = "labeled"
HAVE_LABELS = ("labeled texts", "texts with a number")
"""What an objective learns from rows of that kind (`Objective.learns_from`)."""
PLAIN = ("text", LABELED)
"""Kinds whose rows are no conversations."""

# kind of a source's rows -> what a row must have, may have, and what its messages consist of
ROW_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "labeled": (("text", "label"), ("text_pair",), ()),
    "alpaca": (("instruction", "output"), ("input", "system"), ()),
    "prompt": (("prompt", "completion"), ("system",), ()),
    "messages": (("messages",), ("tools",), ("role", "content")),
    "sharegpt": (("conversations",), ("system", "tools"), ("from", "value")),
    "preference": (("prompt", "chosen", "rejected"), ("system", "tools"), ()),
    "rated": (("prompt", "completion", "label"), ("system", "tools"), ()),
}
