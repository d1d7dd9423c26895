"""Tables of scores for the terminal: a line for each held-out source."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.guard.terminal import visible


def print_table(
    names: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    compute: Compute,
    console: Console | None = None,
) -> None:
    """Prints columns of these names and rows, of which the first value is a source's name, and
    the compute settings."""
    console = console or Console()
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left")
    for source, *values in rows:
        table.add_row(Text(visible(source, lines=False)), *values)
    console.print(table)
    console.print(compute_text(compute), highlight=False)
