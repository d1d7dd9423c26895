"""Scores of tagged words, printed."""

from collections.abc import Sequence

from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.evals.loss import SourceLoss
from lmwright.evals.tables import of_source, print_table, table_of


def print_tags(
    losses: Sequence[SourceLoss], compute: Compute, console: Console | None = None
) -> None:
    """Prints the scores of each source."""
    names = ("source", "words", "loss", "accuracy", "entity F1")
    rows = [
        of_source(loss, f"{loss.accuracy:.1%}", f"{loss.entity_f1 or 0:.4f}") for loss in losses
    ]
    print_table(table_of(names, rows), compute, console)
