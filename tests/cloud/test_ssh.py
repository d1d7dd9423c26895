"""Jobs on machines behind ssh: the real OpenSSH client, against servers on loopback."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.cloud.spec import load_spec, read_state
from lmwright.cloud.ssh import job as by_ssh
from lmwright.cloud.ssh import launch
from lmwright.cloud.ssh.hosts import Host, read_hosts
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from tests.cloud.fake_ssh import Network
from tests.cloud.test_local import RANK, until
from tests.quick_compile import FLAGS
from tests.saved_run import tiny_run

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
CPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=2",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def network(tmp_path, monkeypatch):
    """Hosts a and b, and a user who reaches them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    network = Network(tmp_path / "network", ["a", "b"], CPU)
    settings = tmp_path / "config" / "lmwright" / "cloud.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'ssh = "ssh -F {tmp_path}/network/config"\n')
    (tmp_path / "hosts.txt").write_text("# two\na address=127.0.0.1\n\nb  # the other\n")
    (tmp_path / "rank.py").write_text(RANK)
    yield network
    by_ssh.hang_up()
    network.close()


def ranks(deeds, *options, name="j"):
    """Launches a command whose ranks do these deeds; returns the exit code."""
    words = [*options, "--", "python3", str(Path("rank.py").resolve()), json.dumps(deeds)]
    return main(["launch", "--on", "ssh:hosts.txt", "--name", name, *words])


def agent(network, host):
    """The living agent on a host."""
    return next(iter(network.machines[host].running("lmwright.cloud.agent")))


def attempts(name="j"):
    """Attempts whose first heartbeat is known: what the ranks on both hosts have printed."""
    spec = load_spec(name)
    by_ssh.supervise(spec)
    logs = [spec.folder / "logs" / f"host-{host}.log" for host in range(2)]
    return min(log.read_text().count("\nattempt ") if log.exists() else 0 for log in logs)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\n-oProxyCommand=x\n", "hosts.txt:2: '-oProxyCommand=x' is not a host"),
        ("a\nb\na\n", "hosts.txt:3: a is in line 1 already"),
        ("a address=x\nb address=x\n", "hosts.txt:2: x is in line 1 already"),
        ("a port=3\n", "hosts.txt:1: 'port=3' is not understood"),
        ("# none\n\n", "hosts.txt: names no host"),
        ("a b\n", "hosts.txt:1: 'b' is not understood"),
        ("b\xe4r\n".encode("latin-1"), "is not text"),
    ],
)
def test_bad_files_of_hosts_are_refused(tmp_path, text, told):
    file = tmp_path / "hosts.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=told):
        read_hosts(f"ssh:{file}")


def test_a_file_of_hosts_is_read(tmp_path):
    (tmp_path / "h").write_text("me@a.b  address=10.0.0.3 # x\n#\n\n10.0.0.4\n")
    first = Host(name="me@a.b", address="10.0.0.3")
    assert read_hosts(f"ssh:{tmp_path}/h") == [first, Host(name="10.0.0.4")]
    for target in ("ssh:", f"ssh:{tmp_path}/none"):
        with pytest.raises(UserError, match="one host a line"):
            read_hosts(target)


def test_a_job_comes_back_and_leaves_nothing(network, capfd):
    assert ranks([[0, 1], [0, 0]]) == 0
    told = capfd.readouterr()
    assert "the leader at 127.0.0.1:" in told.out
    assert "rank 1 ended with exit code 1" in told.err
    assert read_state(load_spec("j"))["attempt"] == 2
    for machine in network.machines.values():
        until(lambda machine=machine: not machine.processes())
        assert machine.jobs() == ["j"]
        assert not list(machine.state.glob("lmwright/jobs/j/beats/*"))
    assert main(["jobs", "logs", "j", "--host", "1"]) == 0
    assert capfd.readouterr().out.count("--- attempt") == 2
    assert main(["jobs", "forget", "j"]) == 0
    assert [machine.jobs() for machine in network.machines.values()] == [[], []]


def test_a_launch_that_is_killed_leaves_no_job_of_this_machine(network, monkeypatch):
    """Without the facts beside it the next `jobs follow` would start the ranks here."""
    seen, save = [], launch.save_spec

    def saved(spec, *files):
        save(spec, *files)
        seen.append(by_ssh.is_ssh(spec))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "save_spec", saved)
    assert ranks([[0, 0]]) == 130 and seen == [True]
    assert all(machine.jobs() == [] for machine in network.machines.values())


@pytest.mark.slow
def test_agents_outlive_the_laptop_and_are_replaced(network, capfd):
    assert ranks([["wait", "wait"]], "--detach") == 0
    until(lambda: attempts() == 1)
    before = agent(network, "b").pid
    by_ssh.hang_up()  # the laptop goes away
    assert agent(network, "b").pid == before
    token = load_spec("j").token
    for machine in network.machines.values():
        words = [word for line in machine.running().values() for word in line]
        assert machine.commands and "lmwright.cloud.agent" in words
        assert token not in " ".join([*words, *machine.commands])
        assert (machine.state / "lmwright/jobs/j").stat().st_mode & 0o077 == 0
    agent(network, "b").kill()
    until(lambda: attempts() == 2)  # and is back
    rank = agent(network, "a").children()[0]
    agent(network, "a").send_signal(signal.SIGSTOP)  # the leader with it
    until(lambda: attempts() == 3)
    assert not rank.is_running()
    agent(network, "b").kill()
    until(lambda: attempts() == 4)
    told = (load_spec("j").folder / "events.log").read_text()
    assert "host 1: the agent on b died; started again" in told and "host 1 is lost" in told
    assert main(["jobs", "show", "j"]) == 0
    assert "there now: [0, 1]" in capfd.readouterr().out
    assert main(["jobs", "forget", "j"]) == 2
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    for machine in network.machines.values():
        until(lambda machine=machine: not machine.processes())
        assert machine.jobs() == []


def test_a_host_that_is_not_reached_for_a_while(network, capfd):
    assert ranks([["wait", "wait"]], "--detach") == 0
    until(lambda: attempts() == 1)
    network.cut("b")
    events = load_spec("j").folder / "events.log"
    until(lambda: attempts() and events.exists() and "host 1: b: " in events.read_text())
    assert "ssh b true" in events.read_text()
    assert main(["jobs", "show", "j"]) == 0
    assert "Connection refused" in capfd.readouterr().err
    network.mend("b")
    until(lambda: attempts() and "host 1: b is reached again" in events.read_text())
    assert read_state(load_spec("j"))["attempt"] == 1  # the job went on all the time
    network.cut("b")
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    assert "b: " in capfd.readouterr().err
    assert network.machines["a"].jobs() == [] and network.machines["b"].jobs() == ["j"]


def test_a_job_is_stopped_and_started_again(network, capfd):
    assert ranks([["wait", "wait"], [0, 0]], "--detach") == 0
    until(lambda: attempts() == 1)
    assert main(["jobs", "stop", "j"]) == 0
    assert "job j: stopped at step" in capfd.readouterr().out
    assert main(["jobs", "start", "j"]) == 0
    state = read_state(load_spec("j"))
    assert (state["status"], state["attempt"]) == ("done", 2)
    assert main(["jobs", "ssh", "j", "--host", "1", "echo", "two  words"]) == 0
    assert capfd.readouterr().out.endswith("welcome to b\ntwo  words\n")


def test_one_home_for_all_machines(network, tmp_path):
    for machine in network.machines.values():
        machine.variables["XDG_STATE_HOME"] = str(tmp_path / "state")
    (tmp_path / "hosts.txt").write_text("a\n")
    assert ranks([[1], [0]]) == 0
    log = load_spec("j").folder / "logs" / "host-0.log"
    assert log.read_text().count("--- attempt") == 2
    assert main(["jobs", "forget", "j"]) == 0
    assert not log.parent.parent.exists()


def test_a_host_knows_where_its_job_is_looked_after(network, monkeypatch, capfd):
    assert ranks([[0, 0]]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(network.machines["b"].state))
    assert main(["jobs", "show", "j"]) == 0
    assert main(["jobs", "follow", "j"]) == 2
    assert "was launched from" in capfd.readouterr().err


def known_keys_gone(network):
    (network.folder / "known").write_text("")


def key_refused(network):
    (network.folder / "key").unlink()


def host_down(network):
    network.cut("b")


def name_unknown(network):
    (network.folder.parent / "hosts.txt").write_text("a\nno-such-host.invalid\n")


def named_twice(network):
    variables = network.machines["b"].variables
    variables["XDG_STATE_HOME"] = network.machines["a"].variables["XDG_STATE_HOME"]


def no_python(network):
    network.machines["b"].variables["PATH"] = "/nowhere"


def no_lmwright(network):
    del network.machines["b"].variables["PYTHONPATH"]
    network.machines["b"].variables["PATH"] = f"{network.folder}/b/bin:/usr/bin:/bin"
    wrapper = network.folder / "b" / "bin" / "python3"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    wrapper.chmod(0o755)


def name_taken(network):
    (network.machines["b"].state / "lmwright" / "jobs" / "j").mkdir(parents=True)


def address_elsewhere(network):
    (network.folder.parent / "hosts.txt").write_text("a address=203.0.113.7\nb\n")


def ssh_missing(network):
    file = network.folder.parent / "config" / "lmwright" / "cloud.toml"
    file.write_text('ssh = "no-such-ssh"\n')


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (known_keys_gone, "connect once by hand, and compare its key: ssh a"),
        (key_refused, "Permission denied (publickey); add your key there (ssh-copy-id a)"),
        (host_down, "b: ssh: connect to host 127.0.0.1 port"),
        (name_unknown, "correct the name in the file of hosts"),
        (named_twice, "b: is the same machine as a"),
        (no_python, "b: there is no python3 there; install lmwright"),
        (no_lmwright, "b: python3 has no lmwright"),
        (name_taken, "b has a job 'j' already"),
        (address_elsewhere, "address=203.0.113.7 is not an address of a itself"),
        (ssh_missing, "no-such-ssh: no such program"),
    ],
)
def test_a_host_that_refuses_is_told(network, capfd, wrong, told):
    wrong(network)
    before = [machine.jobs() for machine in network.machines.values()]
    assert ranks([[0, 0]]) == 2
    error = capfd.readouterr().err
    assert told in error and len(error.splitlines()) == 1, error
    assert not (load_spec_folder() / "j").exists()
    assert [machine.jobs() for machine in network.machines.values()] == before
    for machine in network.machines.values():
        until(lambda machine=machine: not machine.processes())


def load_spec_folder():
    return Path(os.environ["XDG_STATE_HOME"], "lmwright", "jobs")


@pytest.fixture
def run(network, tmp_path):
    run = tiny_run(tmp_path)
    (tmp_path / "run.toml").write_text(dump_toml(run))
    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dir=run"], "dir: run: a relative path means nothing on other machines"),
        (["dir=/proc/none"], "the run directory cannot be written there"),
        (["data.dir=/nowhere"], "data.dir: a has no prepared data in /nowhere"),
        (["--do", "eval"], "eval runs on one host, and ssh:hosts.txt has 2"),
    ],
)
def test_a_run_that_the_hosts_cannot_do_is_refused(network, run, capfd, words, told):
    assert main(["launch", "run.toml", "--on", "ssh:hosts.txt", "--name", "j", *words]) == 2
    assert told in capfd.readouterr().err
    assert not Path(run.dir).exists()
    assert [machine.jobs() for machine in network.machines.values()] == [[], []]


def test_a_folder_of_each_host_alone_is_refused(network, run, tmp_path):
    """Two hosts that really differ: what one writes, the other does not see."""
    from lmwright.cloud.ssh import far

    shared = tmp_path / "deep" / "run"
    made = far.mark(str(shared), "t")
    assert far.marked(str(shared), "t") == {"seen": True}
    far.PATIENCE_S, before = 0.1, far.PATIENCE_S
    try:
        assert far.marked(str(tmp_path), "t") == {"seen": False}
    finally:
        far.PATIENCE_S = before
    far.unmark(str(shared), "t", made["made"])
    assert not (tmp_path / "deep").exists()


def test_a_dry_run_tells_commands_and_files(network, run, capfd):
    words = ["--on", "ssh:hosts.txt", "--name", "j", "--remote-python", "/opt/v/bin/python"]
    assert main(["launch", "run.toml", "--dry-run", *words]) == 0
    told = capfd.readouterr().out
    assert "-o BatchMode=yes" in told and "host 1: would start /opt/v/bin/python -m" in told
    assert "job.json, ssh.json, run.toml" in told and "train run.toml" in told
    assert not any(machine.commands for machine in network.machines.values())


@pytest.mark.slow  # a minute
def test_a_run_on_two_hosts_loses_a_rank_and_trains_to_its_end(network, run):
    words = [
        "train.global_batch_size=4",
        "train.steps=100",
        "checkpoint.save_every_steps=20",
        "metrics.log_every_steps=10",
    ]
    words += ["--on", "ssh:hosts.txt", "--name", "j", "--detach"]
    assert main(["launch", "run.toml", *words]) == 0
    until(
        lambda: by_ssh.supervise(load_spec("j")) or read_state(load_spec("j"))["saved"] >= 20, 120
    )
    for process in agent(network, "b").children():
        process.kill()
    assert main(["jobs", "follow", "j"]) == 0
    state = read_state(load_spec("j"))
    assert (state["status"], state["step"], state["attempt"]) == ("done", 100, 2)
    lines = [json.loads(line) for line in Path(run.dir, "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == [1, *range(10, 101, 10)]  # none is missing, none twice
    environment = json.loads(Path(run.dir, "env.json").read_bytes())
    assert '"process_count": 2' in json.dumps(environment)
