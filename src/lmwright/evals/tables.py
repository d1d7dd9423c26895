"""Tables of scores for the terminal: a line for each held-out source, or each class."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.evals.source_loss import SourceLoss
from lmwright.guard.terminal import print_table, visible


@dataclass(frozen=True)
class TaskLoss(SourceLoss):
    """Means over the texts, words, pairs or questions of one source."""

    names: ClassVar[tuple[str, ...]]
    """Names of a table's columns; `figures` fills those after the loss."""

    @property
    def perplexity(self) -> None:
        """None: no tokens are predicted."""
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a table."""
        return self.names

    def details(self) -> list[Table]:
        """Tables about this source."""
        return []


def print_losses(
    losses: Sequence[SourceLoss],
    compute: Compute,
    console: Console | None = None,
    num_devices: int = 1,
    num_copies: int = 1,
) -> None:
    """Prints the scores per source, and the settings that they were computed with."""
    console = console or Console()
    print_table(console, loss_table(losses))
    for detail in (detail for loss in losses for detail in loss.details()):
        if isinstance(detail, str):
            console.print(Text(visible(detail, lines=False)), soft_wrap=True)
        else:
            console.print()
            print_table(console, detail)
    console.print(compute_text(compute, num_devices, num_copies), highlight=False)


def loss_table(losses: Sequence[SourceLoss]) -> Table:
    """Table with a line for each source."""
    columns = max((loss.columns for loss in losses), key=len, default=())
    return table_of(columns, [loss.line for loss in losses])


def table_of(names: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Columns of these names, of which the first one is text and the others are figures."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(Text(visible(name, lines=False)), justify="right" if place else "left")
    for first, *figures in rows:
        table.add_row(Text(visible(first, lines=False)), *figures)
    return table
