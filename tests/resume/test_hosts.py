"""Two processes of four devices train as one process of eight does."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config import dump_toml
from lmwright.errors import UserError
from lmwright.plan.resolve import resolve
from lmwright.run import Mesh
from lmwright.train.hosts import HostRows, join
from lmwright.train.loop import train
from quick_compile import FLAGS

from .conftest import in_dir, losses, typed


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_two(run):
    """Two processes that train together, joined on loopback."""
    run_file = Path(run.dir).with_suffix(".toml")
    run_file.write_text(dump_toml(run))
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "lmwright", "train", str(run_file)],
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": os.pathsep.join(sys.path),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=4",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]


def outputs(processes, codes, timeout_s=240):
    """What they print until they end, which must be with these exit codes."""
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == codes, "\n".join(said)
    return said


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "stage": 2, "fsdp": 2},  # each process has rows of its own
        pytest.param(
            {"fsdp": 1, "context": 4, "tensor": 2}, marks=pytest.mark.slow
        ),  # both need all rows
    ],
)
def test_two_processes_equal_one(small_run, axes, tmp_path):
    run = replace(small_run, mesh=Mesh(**axes))
    run = replace(run, train=replace(run.train, global_batch_size=8))
    whole, two = in_dir(run, tmp_path / "whole"), in_dir(run, tmp_path / "two")
    assert train(whole).step == 12
    said = outputs(start_two(two), [0, 0])
    assert "done: 12 steps" in said[0] and "done" not in said[1]
    expected = losses(whole)
    assert len(expected) == 12
    np.testing.assert_allclose(list(losses(two).values()), list(expected.values()), rtol=1e-5)

    shutil.rmtree(Path(two.dir) / "checkpoints" / "12")
    assert train(replace(two, mesh=Mesh()), jax.devices()[:1]).step == 12
    events = (Path(two.dir) / "metrics.jsonl").read_text()
    assert '"resume"' in events
    np.testing.assert_allclose(list(losses(two).values()), list(expected.values()), rtol=1e-5)


@pytest.mark.slow
def test_sigterm_to_one_stops_both_at_the_same_step(small_run, tmp_path):
    run = in_dir(replace(small_run, mesh=Mesh(data=2, fsdp=4)), tmp_path / "run")
    run = replace(run, train=replace(run.train, steps=100_000, global_batch_size=16))
    processes = start_two(run)
    metrics = Path(run.dir) / "metrics.jsonl"
    began = time.monotonic()
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert time.monotonic() - began < 200
        time.sleep(0.5)
    processes[1].send_signal(signal.SIGTERM)
    said = outputs(processes, [42, 42])
    step = int(re.search(r"stopped after step (\d+);", said[0])[1])
    assert (Path(run.dir) / "checkpoints" / str(step)).is_dir()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "set without JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES: 'two' is not a number"),
        ({"JAX_PROCESS_ID": "2"}, "2 is not below JAX_NUM_PROCESSES = 2"),
    ],
)
def test_incomplete_variables_are_refused(variables, says):
    rest = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    variables = (
        variables if len(variables) == 1 and "a:1" in variables.values() else rest | variables
    )
    with pytest.raises(UserError, match=says):
        join(variables=variables)


def test_pod_on_a_machine_alone_says_what_it_is_for(small_run, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(in_dir(small_run, tmp_path / "run")))
    done = typed(tmp_path, "train", "run.toml", "--pod")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--pod: JAX finds the other processes on TPU pods" in line and "leave --pod out" in line


def test_rows_of_a_host(small_run):
    run = replace(small_run, mesh=Mesh(data=2, fsdp=4))
    run = replace(run, train=replace(run.train, global_batch_size=16))
    plan = resolve(run, jax.devices())
    host = HostRows.of(plan)
    assert host.stretches == ((0, 8),) and host.of_batch == [(0, 16)]
    rows = np.arange(16 * 32).reshape(16, 32)
    placed = host.place(plan, rows)
    np.testing.assert_array_equal(placed[1], rows[1::2])
    apart = HostRows(((1, 2), (4, 6)), 2, 8)
    assert apart.of_batch == [(2, 4), (8, 12)]
    assert [apart._local(row) for row in (1, 4, 5)] == [0, 1, 2]
