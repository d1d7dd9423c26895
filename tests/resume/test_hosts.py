"""Two processes of four devices train as one process of eight does."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.load import dump_toml
from lmwright.config.run import Limits, Mesh
from lmwright.errors import EXIT_TRANSIENT, UserError
from lmwright.program.plan import resolve
from lmwright.report.ledger import LEDGER
from lmwright.train.hosts import HostRows, join, started_together
from lmwright.train.session import train
from lmwright.train.signals import EXIT_TIME_SPENT
from tests.quick_compile import FLAGS
from tests.resume.small_runs import in_dir, losses, typed


def free_port():
    """A port that nobody is given who asks for any, as those of other tests are."""
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return sock.getsockname()[1]


def start_two(run, before="", **variables):
    """Two processes that train together, joined on loopback, after the lines of `before`."""
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    together |= variables
    return [start_one(run, together | {"JAX_PROCESS_ID": str(k)}, before) for k in range(2)]


def start_one(run, variables, before=""):
    """A process of four devices that trains, with these variables."""
    run_file = Path(run.dir).with_suffix(".toml")
    run_file.write_text(dump_toml(run))
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{before}\nfrom lmwright.cli.main import main\n"
            f"raise SystemExit(main(['train', {str(run_file)!r}]))",
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=4",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(processes, codes, timeout_s=240):
    """What they print until they end, which must be with these exit codes. Where one ends with
    another, the rest is killed: it would wait."""
    end = time.monotonic() + timeout_s
    with ThreadPoolExecutor(len(processes)) as pool:
        readers = [pool.submit(process.communicate) for process in processes]
        while None in (now := [process.poll() for process in processes]) and time.monotonic() < end:
            if any(code not in (None, wanted) for code, wanted in zip(now, codes, strict=True)):
                time.sleep(10)  # the rest may say why
                break
            time.sleep(0.1)
        for process in processes:
            process.kill()
        said = [reader.result()[0] for reader in readers]
    assert [process.returncode for process in processes] == codes, "\n".join(said)
    return said


TELLS_CACHE = """
import jax
from lmwright.train.hooks import HOOKS, Hook
class Tell(Hook):
    def after_step(self, session, done):
        if done == 1:
            print("programs from the cache:", jax.config.jax_enable_compilation_cache, flush=True)
HOOKS.append(Tell())
"""


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 4},  # each process has rows of its own
        pytest.param({"data": 2, "stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"fsdp": 1, "context": 4, "tensor": 2}, marks=pytest.mark.slow
        ),  # both need all rows
    ],
)
def test_two_processes_equal_one(small_run, axes, tmp_path):
    """On CPUs they take no program from JAX's cache, which has lost the order of its collectives:
    devices that take them in another one wait for each other, now and then."""
    model = replace(small_run.model, num_layers=axes.get("stage", 1))
    run = replace(small_run, model=model, mesh=Mesh(**axes))
    run = replace(run, train=replace(run.train, global_batch_size=16, steps=6))
    whole, two = in_dir(run, tmp_path / "whole"), in_dir(run, tmp_path / "two")
    assert train(whole).step == 6
    said = outputs(start_two(two, TELLS_CACHE, JAX_ENABLE_COMPILATION_CACHE="true"), [0, 0])
    assert "done: 6 steps" in said[0] and "done" not in said[1]
    assert all("programs from the cache: False" in each for each in said)
    expected = losses(whole)
    assert len(expected) == 6
    np.testing.assert_allclose(list(losses(two).values()), list(expected.values()), rtol=1e-5)

    shutil.rmtree(Path(two.dir) / "checkpoints" / "6")
    assert train(replace(two, mesh=Mesh()), jax.devices()[:1]).step == 6
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


QUICK = "from lmwright.train import peers; peers.HEARTBEAT_S = 15"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_the_survivor_of_a_lost_process_says_so_and_the_run_resumes(
    small_run, tmp_path, lost, number
):
    run = in_dir(replace(small_run, mesh=Mesh(data=2, fsdp=4)), tmp_path / "run")
    run = replace(run, train=replace(run.train, steps=100_000, global_batch_size=16))
    processes = start_two(run, QUICK)
    metrics = Path(run.dir) / "metrics.jsonl"
    began = time.monotonic()
    try:
        while not (metrics.exists() and metrics.read_text().count('"train"') > 5):
            assert time.monotonic() - began < 200
            assert [p.poll() for p in processes] == [None, None], processes[0].stdout.read()
            time.sleep(0.5)
        processes[lost].send_signal(number)
        said = processes[1 - lost].communicate(timeout=120)[0]
    finally:
        for process in processes:
            process.kill()
    assert processes[1 - lost].returncode == 45, said
    (line,) = [line for line in said.splitlines() if line.startswith("lmwright: ")]
    assert f"process {lost} of 2 was lost" in line and "start all processes again" in line
    assert "Traceback" not in said and "    @ " not in said
    os.unlink(re.search(r"details in (\S+)", line)[1])
    more = replace(run, train=replace(run.train, steps=int(max(losses(run))) + 1))
    outputs(start_two(more), [0, 0])


FULL_ON_ONE = """
import os, resource
from lmwright.train.hooks import HOOKS, Hook
class Full(Hook):
    def before_save(self, session, step):
        if step == 6 and os.environ["JAX_PROCESS_ID"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
HOOKS.append(Full())
"""


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_host_ends_all(small_run, tmp_path):
    """The other one would wait for its part of the checkpoint until Orbax gives up."""
    run = in_dir(replace(small_run, mesh=Mesh(data=1, fsdp=8)), tmp_path / "run")
    run = replace(run, train=replace(run.train, global_batch_size=16))
    said = outputs(start_two(run, QUICK + FULL_ON_ONE), [45, 2], timeout_s=150)
    assert "the checkpoint could not be written" in said[1] and "free some space" in said[1]
    outputs(start_two(run), [0, 0])


NO_LEDGER_ON_ONE = """
import os
from lmwright.train import budget
if os.environ["JAX_PROCESS_ID"] == "1":
    budget.read_ledger = lambda *_: []
"""


def test_a_total_that_is_spent_ends_all(small_run, tmp_path):
    """Of a run in a bucket, the first host alone has the ledger: the others would wait for it."""
    run = in_dir(replace(small_run, mesh=Mesh(data=2, fsdp=4)), tmp_path / "run")
    run = replace(run, train=replace(run.train, global_batch_size=16))
    run = replace(run, limits=Limits(total_hours=1.0))
    Path(run.dir).mkdir()
    (Path(run.dir) / LEDGER).write_text(json.dumps([{"seconds": 3599.0}]))
    said = outputs(start_two(run, QUICK + NO_LEDGER_ON_ONE), [EXIT_TIME_SPENT] * 2)
    assert "limits.total_hours = 1 are spent" in said[0]


def test_processes_that_never_come_are_waited_for_and_named(small_run, tmp_path):
    early = "; peers.JOIN_S = 4; peers.FIRST_NOTE_S = peers.NOTE_EVERY_S = 1.5"
    first, second = start_two(in_dir(small_run, tmp_path / "run"), QUICK + early)
    second.kill()
    said = outputs([first], [45], 60)[0].splitlines()
    assert re.match(
        r"lmwright: waiting for the other 1 processes at 127.0.0.1:\d+, 2 s of", said[0]
    )
    assert "did not come within 4 s" in said[-1] and len(said) <= 4
    assert not (tmp_path / "run").exists()


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


def test_a_join_that_fails_is_tried_again_by_a_supervisor(monkeypatch):
    def fail(**_):
        raise RuntimeError("Barrier timed out")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setenv("LMWRIGHT_HEARTBEAT", "file")
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    with pytest.raises(UserError, match=r"not found \(Barrier") as told:
        join(variables=variables)
    assert told.value.exit_code == EXIT_TRANSIENT


def test_pod_on_a_machine_alone_says_what_it_is_for(small_run, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(in_dir(small_run, tmp_path / "run")))
    done = typed(tmp_path, "train", "run.toml", "--pod")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--pod: JAX finds the other processes on TPU pods" in line and "leave out --pod" in line


def test_rows_of_a_host(small_run):
    run = replace(small_run, mesh=Mesh(data=2, fsdp=4))
    run = replace(run, train=replace(run.train, global_batch_size=16))
    plan = resolve(run, jax.devices())
    host = HostRows.of(plan)
    assert host.stretches == ((0, 8),)
    rows = np.arange(16 * 32).reshape(16, 32)
    placed = host.place(plan, rows)
    np.testing.assert_array_equal(placed[1], rows[1::2])
    apart = HostRows(((1, 2), (4, 6)), 2, 8)
    assert [apart._local(row) for row in (1, 4, 5)] == [0, 1, 2]


@pytest.mark.slow
def test_two_processes_agree_on_what_cannot_be_used(small_run, tmp_path):
    run = in_dir(replace(small_run, mesh=Mesh(fsdp=8)), tmp_path / "run")
    short = replace(run.train, steps=6, global_batch_size=16)
    run = replace(run, train=short)
    wild = replace(in_dir(run, tmp_path / "wild"), train=replace(short, steps=1))
    wild = replace(wild, optim=replace(run.optim, learning_rate=1e39))
    for said in outputs(start_two(wild), [2, 2]):
        assert "infinities after step 1, and nothing was saved before" in " ".join(said.split())
    outputs(start_two(run), [0, 0])
    (Path(run.dir) / "checkpoints/6/state/_METADATA").write_text("{}")
    said = outputs(start_two(replace(run, train=replace(short, steps=8))), [0, 0])
    assert "checkpoint 6 is damaged" in said[0] and "is damaged" not in said[1]
    assert "continuing from step 3" in said[0]
    assert sorted(losses(run)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("variables", "joins"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),  # a batch script, without srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_PROCESS_ADDRESSES": "a:8471,b:8471", "TPU_WORKER_HOSTNAMES": "a"}, True),
        ({"TPU_PROCESS_ADDRESSES": "a:8471", "MEGASCALE_NUM_SLICES": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": ""}, False),  # as a manifest of one slice has it
    ],
)
def test_launchers_are_recognized(variables, joins):
    assert started_together(variables) == joins


@pytest.mark.parametrize(
    "variables, gpus",
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "all"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "JAX_LOCAL_DEVICE_IDS": "0"}, "0"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "all"),
        ({}, "0"),
    ],
)
def test_one_process_on_a_machine_takes_all_its_gpus(variables, gpus, monkeypatch):
    """JAX gives a process of Slurm and MPI the GPU of its own number on its machine."""
    before = jax.config.read("jax_cuda_visible_devices")
    narrow = lambda **_: jax.config.update("jax_cuda_visible_devices", "0")  # noqa: E731
    monkeypatch.setattr(jax.distributed, "initialize", narrow)
    together = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    try:
        join(variables=together | variables)
        assert jax.config.read("jax_cuda_visible_devices") == gpus
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


@pytest.mark.slow  # two processes that compile
def test_slurms_processes_find_each_other(small_run, tmp_path):
    """As srun starts them, on this machine."""
    run = replace(
        in_dir(small_run, tmp_path / "run"),
        eval=replace(small_run.eval, every_steps=None),
        train=replace(small_run.train, global_batch_size=16),  # each process has four devices
    )
    slurm = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    processes = []
    for index in range(2):
        own = slurm | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        processes += [start_one(run, own)]
    outputs(processes, [0, 0])
    assert len(losses(run)) == run.train.steps
