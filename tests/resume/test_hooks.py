"""Hooks are called at the moments that docs/train.md names, in their order."""

import jax
import numpy as np
import pytest

from lmwright.checkpoint.saved import SavedStates
from lmwright.errors import EXIT_INTERRUPTED
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


class Asked(Hook):
    """Notes the steps before which it is asked, and gives the same answer to all but some."""

    def __init__(self, answer, but=None):
        self.answer, self.but = answer, but or {}
        self.steps = []

    def before_step(self, session, step):
        self.steps.append(step)
        return self.but.get(step, self.answer)


@pytest.mark.parametrize(("answer", "stop"), [(None, False), (True, np.False_)])
def test_only_false_ends_the_session_and_every_hook_is_asked_once(
    small_run, tmp_path, answer, stop
):
    run = in_dir(small_run, tmp_path / "run")
    ends, other = Asked(answer, {2: stop}), Asked(answer)
    outcome = train(run, jax.devices()[:1], hooks=[ends, other])
    assert (outcome.step, outcome.exit_code) == (2, EXIT_INTERRUPTED)
    assert ends.steps == other.steps == [0, 1, 2]
    goes_on = Asked(answer, {2: None, 3: stop})
    assert train(run, jax.devices()[:1], hooks=[goes_on]).step == 3
    assert goes_on.steps == [2, 3]


def test_a_session_may_end_before_its_first_step(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    ends, other = Asked(False), Asked(True)
    assert train(run, jax.devices()[:1], hooks=[ends, other]).step == 0
    assert ends.steps == other.steps == [0]
    assert not SavedStates(tmp_path / "run").steps()
