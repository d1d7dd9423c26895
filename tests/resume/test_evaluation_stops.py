"""An evaluation that is asked to stop ends within a batch, and the next session begins with it."""

import signal
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Eval, Mesh
from lmwright.data.rows.store import TokenStore
from lmwright.evals import held_out
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.train.budget import Budget
from lmwright.train.hooks import Hook
from lmwright.train.session import train
from lmwright.train.signals import EXIT_PREEMPTED, EXIT_SESSION_OVER
from tests.resume.small_runs import in_dir, logged, losses
from tests.resume.test_hosts import outputs, start_two


class Beats:
    """Counts the batches of evaluations, and does something at one of them."""

    def __init__(self):
        self.batches = self.at = 0
        self.act = lambda: signal.raise_signal(signal.SIGTERM)

    def __call__(self, _phase):
        self.batches += 1
        if self.batches == self.at:
            self.act()


@pytest.fixture
def beats(monkeypatch):
    beats = Beats()
    monkeypatch.setattr(held_out, "beat", beats)
    return beats


def num_batches(run, rows=2):
    """Batches of an evaluation, of the rows of a microbatch."""
    store = TokenStore.open(run.data.dir)
    return sum(-(-store.eval_rows(source) // rows) for source in store.eval_sources)


def evaluated(run):
    return [(line["step"], line["source"], line["loss"]) for line in logged(run, "eval")]


@pytest.mark.parametrize("step", [6, 12])  # in the run, and at its end
def test_it_is_done_when_the_run_goes_on(small_run, trained_run, tmp_path, beats, capfd, step):
    run = in_dir(small_run, tmp_path / "run")
    beats.at = num_batches(run) * (step // 6 - 1) + 2
    outcome = train(run, jax.devices()[:1])
    assert (outcome.exit_code, outcome.step) == (EXIT_PREEMPTED, step)
    assert beats.batches == beats.at  # none after the signal
    assert SavedStates(Path(run.dir)).steps()[-1] == step
    assert step not in [at for at, *_ in evaluated(run)]
    assert f"the evaluation after step {step} was broken off" in capfd.readouterr().out
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert losses(run) == losses(trained_run) and evaluated(run) == evaluated(trained_run)


def test_samples_are_broken_off_too(small_run, tmp_path, beats):
    run = replace(small_run, eval=Eval(every_steps=6, prompts=("a b",), sample_tokens=8))
    run = in_dir(run, tmp_path / "run")
    beats.at = num_batches(run) + 1
    assert train(run, jax.devices()[:1]).exit_code == EXIT_PREEMPTED
    assert not logged(run, "sample") and beats.batches == beats.at
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert [line["step"] for line in logged(run, "sample")] == [6, 12]


class EarlyStops(Hook):
    def at_end(self, session, step, exit_code):
        self.seen = {name: vars(early) for name, early in session.early_stops.items()}


@pytest.mark.slow  # a step and an evaluation of two adapters are compiled, three times
def test_adapters_that_were_evaluated_are_not_again(small_run, tmp_path, beats):
    """Patience would count the same loss twice."""
    adapters = tuple(
        Adapter(name=name, rows=2, rank=3, patience=9, learning_rate=1e-30) for name in "ab"
    )
    run = replace(small_run, lora=LowRank(base="int8", adapters=adapters))
    run = replace(run, eval=Eval(every_steps=2), train=replace(run.train, steps=4))
    (whole := EarlyStops()), (parts := EarlyStops())
    assert train(in_dir(run, tmp_path / "whole"), jax.devices()[:1], hooks=[whole]).exit_code == 0
    run, per_step = in_dir(run, tmp_path / "parts"), beats.batches // 2
    beats.batches, beats.at = 0, per_step // 2 + 1  # the first of the second adapter
    assert train(run, jax.devices()[:1], hooks=[parts]).exit_code == EXIT_PREEMPTED
    assert parts.seen["a"]["best"] is not None and parts.seen["b"]["best"] is None
    assert train(run, jax.devices()[:1], hooks=[parts]).exit_code == 0
    assert parts.seen == whole.seen
    assert [line["step"] for line in logged(run, "eval")] == [2, 2, 4, 4]


def test_time_that_is_over_breaks_it_off_but_not_at_the_start_of_a_session(
    small_run, tmp_path, beats, monkeypatch
):
    """Otherwise a long one would have the same end in each session."""
    run, late = in_dir(small_run, tmp_path / "run"), []
    over = Budget.over
    monkeypatch.setattr(
        Budget, "over", lambda self, *beside: EXIT_SESSION_OVER if late else over(self, *beside)
    )
    beats.at, beats.act = 2, lambda: late.append(True)
    outcome = train(run, jax.devices()[:1])
    assert (outcome.exit_code, outcome.step, beats.batches) == (EXIT_SESSION_OVER, 6, 2)
    late.clear()
    beats.batches, beats.at = 0, 1
    outcome = train(run, jax.devices()[:1])
    assert (outcome.exit_code, outcome.step) == (EXIT_SESSION_OVER, 7)
    assert beats.batches == num_batches(run) and [at for at, *_ in evaluated(run)] == [6]


TOLD = """
import os, signal
from lmwright.evals import held_out
batches = 0
def beat(_phase):
    global batches
    batches += 1
    print("batch", batches, flush=True)
    if os.environ["JAX_PROCESS_ID"] == "1" and batches == 1:
        os.kill(os.getpid(), signal.{signal})
        {then}
held_out.beat = beat
"""


@pytest.mark.slow  # processes that compile
@pytest.mark.parametrize(
    ("number", "then", "code"),
    [("SIGINT", "", 130), ("SIGTERM", "import time; time.sleep(5)", 42)],  # the runtime's threads
)
def test_hosts_break_it_off_together(small_run, tmp_path, number, then, code):
    """Whichever of them is told: the others would wait for it in the next batch."""
    run = in_dir(replace(small_run, mesh=Mesh(data=2, fsdp=4)), tmp_path / "run")
    run = replace(run, train=replace(run.train, global_batch_size=16, steps=6))
    said = outputs(start_two(run, TOLD.format(signal=number, then=then)), [code, code])
    assert {text.count("batch ") for text in said} == {said[0].count("batch ")}
    assert said[0].count("batch ") <= 2 < num_batches(run, 8)
    assert "the evaluation after step 6 was broken off" in said[0] and not logged(run, "eval")
    outputs(start_two(run), [0, 0])
    assert [line["step"] for line in logged(run, "eval")] == [6]
