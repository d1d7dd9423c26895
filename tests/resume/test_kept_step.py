"""A step that was compiled beforehand trains as the one that training compiles itself."""

import json
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from lmwright.program import executable
from lmwright.program.plan import resolve, step_options
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import make_step
from lmwright.train.session import train
from tests.resume.small_runs import in_dir, losses


def compiled_by_plan(run):
    """What the run's event of compilation says."""
    lines = Path(run.dir, "metrics.jsonl").read_text().splitlines()
    events = [row for row in map(json.loads, lines) if row["kind"] == "compile"]
    assert len(events) == 1
    return events[0]["by_plan"]


def use_cache(wanted):
    jax.config.update("jax_enable_compilation_cache", wanted)
    compilation_cache.reset_cache()


def test_training_takes_over_the_kept_step(small_run, tmp_path, monkeypatch, request):
    # as in plan's process: what JAX's own cache gave back cannot be kept a second time
    use_cache(False)
    request.addfinalizer(lambda: use_cache(True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone, helped = (in_dir(small_run, tmp_path / name) for name in ("alone", "helped"))
    one = jax.devices()[:1]
    train(alone, one)
    plan = resolve(helped, one)
    with jax.set_mesh(plan.mesh):
        lowered = make_step(plan).lower(abstract_state(plan), abstract_batch(plan))
        key = executable.key_of(lowered.as_text(), plan.devices, step_options(plan))
        assert executable.save(key, lowered.compile())
    train(helped, one)
    assert (compiled_by_plan(alone), compiled_by_plan(helped)) == (False, True)
    assert losses(alone) == losses(helped)
    assert len(losses(helped)) == helped.train.steps and np.isfinite(losses(helped)[1])
