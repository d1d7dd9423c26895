"""A run with nothing to train, for tests of what surrounds training."""

import json

from lmwright.config import run as sections


def make_run(trackers=(), **metrics):
    """A run whose model, objective and optimizer are never looked at."""
    return sections.Run(
        name="tiny",
        dir="runs/tiny",
        model=None,
        objective=None,
        optim=None,
        data=sections.Data(dir="prepared"),
        train=sections.Train(steps=10, global_batch_size=2),
        metrics=sections.Metrics(trackers=trackers, **metrics),
    )


def read(path):
    """Lines of a metrics.jsonl as dicts."""
    return [json.loads(line) for line in path.read_text().splitlines()]
