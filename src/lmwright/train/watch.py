"""Watch: early stopping by held-out loss."""

from dataclasses import dataclass


@dataclass
class Watch:
    """The held-out losses of a trainee, for early stopping."""

    best: float | None = None
    since_best: int = 0
    stopped: bool = False

    def see(self, loss: float, patience: int | None) -> None:
        """Takes a held-out loss."""
        self.since_best = 0 if self.best is None or loss < self.best else self.since_best + 1
        self.best = loss if self.best is None else min(loss, self.best)
        self.stopped = patience is not None and self.since_best >= patience
