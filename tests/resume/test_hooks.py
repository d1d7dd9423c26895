"""Hooks are called at the moments that docs/train.md names, in their order."""

import jax

from lmwright.train.hooks import Hook
from lmwright.train.session import train
from tests.resume.small_runs import STEPS, in_dir


class Notes(Hook):
    def __init__(self):
        self.seen = []

    def after_step(self, session, step):
        assert set(session.state["trained"]) == {"model"}
        self.seen.append(("step", step))

    def after_log(self, session, step, measured):
        self.seen.append(("log", step, round(float(session.values["loss"]) - measured["loss"], 5)))

    def after_evaluate(self, session, step):
        self.seen.append(("evaluate", step, len(session.losses)))

    def before_save(self, session, step):
        self.seen.append(("before save", step))

    def after_save(self, session, step):
        self.seen.append(("after save", step))


def test_the_moments_of_a_run(small_run, tmp_path):
    notes = Notes()
    train(in_dir(small_run, tmp_path / "run"), jax.devices()[:1], hooks=[notes])
    expected = []
    for step in range(1, STEPS + 1):
        expected.append(("step", step))
        if step % small_run.metrics.log_every_steps == 0 or step in (1, STEPS):
            expected.append(("log", step, 0.0))
        if step % small_run.eval.every_steps == 0:
            expected.append(("evaluate", step, 1))
        if step % small_run.checkpoint.save_every_steps == 0:
            expected += [("before save", step), ("after save", step)]
    assert notes.seen == expected
