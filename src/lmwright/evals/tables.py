"""Tables of scores for the terminal: a line for each held-out source, or each class."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.evals.loss import SourceLoss
from lmwright.guard.terminal import visible


def table_of(names: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Columns of these names, of which the first one is text and the others are figures."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(Text(visible(name, lines=False)), justify="right" if place else "left")
    for first, *figures in rows:
        table.add_row(Text(visible(first, lines=False)), *figures)
    return table


def of_source(loss: SourceLoss, *figures: str) -> tuple[str, ...]:
    """A row: the source, how many texts or words it has, their loss, and further figures."""
    return (loss.source, f"{loss.tokens:,}", f"{loss.loss:.4f}", *figures)


def print_table(table: Table, compute: Compute, console: Console | None = None) -> None:
    """Prints a table, and the compute settings."""
    console = console or Console()
    console.print(table)
    console.print(compute_text(compute), highlight=False)
