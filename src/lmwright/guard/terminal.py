r"""Untrusted text on a terminal: control characters are shown as escapes and never obeyed.

A row of data, a source's name or a model's answer may hold ESC, which moves the cursor, renames
the window or hides what is above it; `visible` writes it as \x1b.
"""

import re
from typing import Any

LONGEST_LINE = 10_000

# All of C0 and C1 but newline and tab; what reverses the order of what follows; halves of pairs,
# which cannot be printed.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object, *, lines: bool = True) -> str:
    """Text with its control characters escaped; without `lines`, newlines and tabs too."""
    shown = _CONTROL.sub(_escape, str(text))
    return shown if lines else shown.replace("\n", "\\n").replace("\t", "\\t")


def print_table(console: Any, table: Any) -> None:
    """Prints a table of rich with all of its text: a narrow terminal gets cells of several lines,
    and a file, which has no width, lines that are as long as they need to be."""
    from rich.measure import Measurement

    for column in table.columns:
        column.overflow = "fold"
    if console.is_terminal:
        console.print(table)
        return
    before, options = console.width, console.options.update(max_width=LONGEST_LINE)
    console.width = max(before, Measurement.get(console, options, table).maximum)
    console.print(table)
    console.width = before


def _escape(match: re.Match) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
