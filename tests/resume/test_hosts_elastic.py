"""A run goes on with fewer processes and then with more: the same batches, and losses that are
equal but for rounding."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.load import dump_toml
from lmwright.config.run import Mesh
from lmwright.train.session import train
from tests.quick_compile import FLAGS
from tests.resume.small_runs import STEPS, in_dir, losses
from tests.resume.test_hosts import free_port, outputs

# All ask to save and end after the same step.
BEFORE = """
import sys
from lmwright.train.hooks import HOOKS, Hook
class Leave(Hook):
    def after_step(self, session, step):
        if step == {stop}:
            session.stop.exit_code = 42
HOOKS.append(Leave())
from lmwright.cli.main import main
raise SystemExit(main(["train", sys.argv[1]]))
"""


def start(run, count, stop):
    """Processes of one device each that train together until a step."""
    run_file = Path(run.dir).with_suffix(".toml")
    run_file.write_text(dump_toml(run))
    together = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", BEFORE.format(stop=stop), str(run_file)],
            env=together | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]


@pytest.mark.slow
def test_from_four_processes_to_three_and_back(small_run, tmp_path):
    run = replace(
        small_run,
        mesh=Mesh(data="rest", fsdp=1),
        checkpoint=replace(small_run.checkpoint, save_every_steps=100),
    )
    run = replace(run, train=replace(run.train, global_batch_size=12, num_microbatches=1))
    whole, moved = in_dir(run, tmp_path / "whole"), in_dir(run, tmp_path / "moved")
    assert train(whole, jax.devices()[:1]).step == STEPS
    for count, stop in ((4, 4), (3, 8), (4, STEPS + 1)):
        code = 42 if stop < STEPS else 0
        outputs(start(moved, count, stop), [code] * count)
        assert max(losses(moved)) == min(stop, STEPS)
    got, expected = losses(moved), losses(whole)
    assert sorted(got) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([got[k] for k in sorted(got)], list(expected.values()), rtol=2e-5)
