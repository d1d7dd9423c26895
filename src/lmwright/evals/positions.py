"""Loss by position: how well a token is predicted, by how many tokens of its document come before.

    context   1  2-3  4-7  ...  1/8 to 2/8 of a row  2/8 to 3/8  ...     buckets
    loss     9.1  7.4  6.6 ...                  3.2         3.1  ...     a model that uses it falls

Where documents do not see each other, positions count from the start of the document.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.compute import refuse_encoder
from lmwright.evals.loss import Rows, batch_of, compiled
from lmwright.guard.terminal import print_table, visible
from lmwright.nn.logps import token_logps
from lmwright.objectives.clm import next_tokens
from lmwright.report.measured import between

PARTS = 8  # of a row, each a bucket but the first, which is cut at the powers of two


@dataclass(frozen=True)
class PositionLoss:
    """Means over one source by bucket; empty buckets are left out."""

    source: str
    starts: tuple[int, ...]
    """Least number of tokens before a token of each bucket."""
    stops: tuple[int, ...]
    """End of each bucket: one more than the most."""
    losses: tuple[float, ...]
    """Nats per predicted token."""
    tokens: tuple[int, ...]
    """Number of predicted tokens."""

    def line(self) -> dict[str, Any]:
        """The line that is kept in the run directory."""
        return {
            "kind": "positions", "source": self.source, "starts": self.starts,
            "stops": self.stops, "losses": self.losses, "tokens": self.tokens,
        }  # fmt: skip


def bucket_starts(most: int) -> tuple[int, ...]:
    """The fewest tokens of context of each bucket, up to `most`: powers of two in the first eighth,
    then eighths."""
    part = max((most + 1) // PARTS, 1)
    powers = [1 << i for i in range(part.bit_length()) if 1 << i < part]
    return (*powers, *range(part, min(PARTS * part, most + 1), part))


@lru_cache(maxsize=8)
def _sums(model: Model, compute: Compute, starts: tuple[int, ...]) -> Callable[..., Any]:
    def sums(w: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        x, _ = model.hidden(w, batch, compute)
        targets, weights = next_tokens(batch)
        logps = token_logps(
            model.logits, model.head_weights(w), x, targets, chunk=compute.loss_chunk_tokens
        )
        context = batch.positions + 1  # of the target
        bucket = jnp.searchsorted(jnp.asarray(starts), context, side="right") - 1
        here = (bucket == jnp.arange(len(starts))[:, None, None]) * weights  # [buckets, B, T]
        return -jnp.sum(here * logps, axis=(1, 2)), jnp.sum(here, axis=(1, 2))

    return compiled(sums, compute)


def position_losses(
    model: Model,
    compute: Compute,
    weights: Tree,
    source: str,
    batches: Iterable[Rows],
    most: int,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> PositionLoss:
    """Mean loss of the next token by how many tokens it follows, at most `most`, over batches of
    rows; `place` puts a batch on the devices."""
    refuse_encoder(model)
    starts = bucket_starts(most)
    nll, tokens = np.zeros(len(starts)), np.zeros(len(starts))
    for rows in batches:
        sums = _sums(model, compute, starts)(weights, place(batch_of(rows)))
        nll += np.asarray(sums[0], np.float64)
        tokens += np.asarray(sums[1], np.float64)
    some = np.flatnonzero(tokens)
    stops = (*starts[1:], most + 1)
    return PositionLoss(
        source,
        tuple(starts[i] for i in some),
        tuple(stops[i] for i in some),
        tuple(float(nll[i] / tokens[i]) for i in some),
        tuple(int(tokens[i]) for i in some),
    )


def print_positions(measured: Sequence[PositionLoss]) -> None:
    """Prints a table of each source."""
    table = Table(box=None, pad_edge=False)
    for name in ("source", "tokens before", "tokens", "loss"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for each in measured:
        name = Text(visible(each.source, lines=False))
        for start, stop, tokens, loss in zip(
            each.starts, each.stops, each.tokens, each.losses, strict=True
        ):
            table.add_row(name, between(start, stop), f"{tokens:,}", f"{loss:.4f}")
            name = Text("")
    print_table(Console(), table)
