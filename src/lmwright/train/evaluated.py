"""Evaluated: the weights that are evaluated, and the results in metrics.jsonl and on the
display."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmwright.core.param import Tree
from lmwright.data.rows.store import TokenStore
from lmwright.evals.held_out import BrokenOff, HeldOut
from lmwright.evals.source_loss import SourceLoss
from lmwright.program.plan import Plan
from lmwright.program.state import averaged_weights
from lmwright.train.display import Display
from lmwright.train.metrics import MetricsWriter


def eval_weights(plan: Plan, state: Tree, name: str) -> Tree:
    """The model with one trainee, as evaluation and generation read it; traceable."""
    training = plan.training
    trainee = next(candidate for candidate in training.trainees if candidate.name == name)
    parts = training.parts(trainee, averaged_weights(state["trained"][name]))
    return training.bind(state["frozen"], parts)


class HeldOutOfAll:
    """Evaluates each trainee on what is held out of its own data."""

    def __init__(
        self,
        plan: Plan,
        stores: Mapping[str, TokenStore],
        metrics: MetricsWriter,
        display: Display,
    ):
        self._plan, self._metrics, self._display = plan, metrics, display
        self._held_out = {name: HeldOut(plan, store) for name, store in stores.items()}

    def evaluate(
        self, step: int, state: Tree, name: str, stops: Callable[[], bool]
    ) -> list[SourceLoss] | None:
        """Losses of the model with one trainee on its held-out data, which are printed and written
        down after a step, as are its samples; None where it broke off, as `stops` told it to before
        a batch."""
        held_out, prefix = self._held_out[name], f"{name}/" if len(self._held_out) > 1 else ""
        weights = eval_weights(self._plan, state, name)
        held_out.stops = stops
        try:
            losses, samples = held_out.losses(weights), held_out.samples(weights)
        except BrokenOff:
            self._display.note(
                f"the evaluation after step {step} was broken off; the next session begins with it"
            )
            return None
        write_down(self._metrics, self._display, step, prefix, losses, samples)
        return losses


def write_down(
    metrics: MetricsWriter,
    display: Display,
    step: int,
    prefix: str,
    losses: Sequence[SourceLoss],
    samples: Sequence[dict[str, Any]],
) -> None:
    """Writes down held-out losses and samples after a step; the names of their sources, and the
    prompts, get the prefix."""
    for loss in losses:
        metrics.log_eval(
            step,
            prefix + loss.source,
            loss=loss.loss,
            ppl=loss.perplexity,
            bits_per_byte=loss.bits_per_byte,
            tokens=loss.tokens,
            rows=loss.rows,
            of_rows=loss.of_rows,
            scores=loss.averages(),
        )
    if losses:
        notes = (", ".join(filter(None, (loss.note, loss.rows_text))) for loss in losses)
        shown = {
            prefix + loss.source: (loss.loss, note)
            for loss, note in zip(losses, notes, strict=True)
        }
        display.evaluated(step, shown)
    if samples:
        named = [s | {"prompt": f"{prefix} {s['prompt']}".strip()} for s in samples]
        metrics.log_samples(step, named if prefix else samples)
