"""Scores of tagged words, printed."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.evals.loss import SourceLoss
from lmwright.guard.terminal import visible


def print_tags(
    losses: Sequence[SourceLoss], compute: Compute, console: Console | None = None
) -> None:
    """Prints the scores of each source."""
    console = console or Console()
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(("source", "words", "loss", "accuracy", "entity F1")):
        table.add_column(name, justify="right" if place else "left")
    for loss in losses:
        table.add_row(
            Text(visible(loss.source, lines=False)),
            f"{loss.tokens:,}",
            f"{loss.loss:.4f}",
            f"{loss.accuracy:.1%}",
            f"{loss.entity_f1 or 0.0:.4f}",
        )
    console.print(table)
    console.print(compute_text(compute), highlight=False)
