"""Early stopping: a trainee ends when its held-out loss no longer falls."""

from dataclasses import dataclass


@dataclass
class EarlyStop:
    """The held-out losses of a trainee so far, and whether it has stopped."""

    best: float | None = None
    since_best: int = 0
    stopped: bool = False

    def see(self, loss: float, patience: int | None) -> None:
        """Takes a held-out loss."""
        fell = loss < (float("inf") if self.best is None else self.best)  # NaN never does
        self.since_best, self.best = (0, loss) if fell else (self.since_best + 1, self.best)
        self.judge(patience)

    def judge(self, patience: int | None) -> None:
        """Decides whether the trainee has stopped; `patience` may differ from that of an earlier
        session."""
        self.stopped = patience is not None and self.since_best >= patience
