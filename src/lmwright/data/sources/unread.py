"""Files of a source that are not read: the errors that say why, and what helps."""

import os
from collections.abc import Iterable

from lmwright.config.run import Source
from lmwright.data.sources.endings import ENDINGS, PACKED, split_ending
from lmwright.errors import UserError


def refuse_unread(source: Source, others: list[str], single: bool) -> None:
    """Raises UserError for a source that has no other files than these, or is one of them
    (`single`)."""
    endings = sorted({split_ending(p)[0] or "no ending" for p in others})
    shown = ", ".join(endings[:8])
    if source.format != "auto":
        raise UserError(
            f"data.sources: {source.path} holds no {source.format} file, only {shown}; "
            "change data.sources.format"
        )
    if ".arrow" in endings:
        raise UserError(
            f"data.sources: {source.path} is an Arrow file, which is read in the folder that "
            "`datasets` wrote with save_to_disk; give that folder, or write parquet"
        )
    known = ", ".join(e for es in ENDINGS.values() for e in es)
    lists = "a .json with one object a line is format = 'jsonl', one that is a list 'json'"
    hint = f" ({lists})" if ".json" in endings else ""
    if packed := [each for each in endings if each.endswith(PACKED)]:
        raise UserError(
            f"data.sources: {source.path} is packed as {packed[0]}, which is not read; unpack it, "
            "or pack it as .gz or .zst"
        )
    raise UserError(
        f"data.sources: {source.path} {'is' if single else 'holds only files'} of an unknown "
        f"format ({shown}); supported are {known}, each also .gz and .zst; set "
        f"data.sources.format, such as 'txt' for plain text{hint}"
    )


def refuse_packed(source: Source, others: Iterable[str]) -> None:
    """Raises UserError for files among others that would be read if they were not packed so: they
    would be missed without a word."""
    for path in others:
        stem, ending = os.path.splitext(path.lower())
        inner = os.path.splitext(stem)[1]
        if ending in PACKED and any(inner in endings for endings in ENDINGS.values()):
            raise UserError(
                f"data.sources: {path} is packed as {ending}, which is not read; unpack it, pack "
                "it as .gz or .zst, or leave it out by a glob in data.sources.path"
            )
