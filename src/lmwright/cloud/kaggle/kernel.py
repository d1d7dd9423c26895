"""Kernel: the script that runs at Kaggle, or in a notebook; it trains in an environment of its own.

    secrets, internet, inputs --> Python, packages --> chips? --> lmwright.cloud.kaggle.session

The text of this file is sent with its SETTINGS, so it imports nothing but what every Python has.
What cannot be known before the launch is checked here, in the first minute.
"""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

SETTINGS: dict = {}

ERROR = "lmwright: error: "
CONNECT_S = 10
DEVICES_S = 300
# Of the image: they would bring its packages into our environment.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "VIRTUAL_ENV", "TPU_LIBRARY_PATH")
DEVICES = "import jax; d = jax.devices(); print(d[0].platform, len(d), d[0].device_kind, sep='|')"


class Refusal(Exception):
    """Reason why this session cannot train; one sentence with the cure."""


def main(settings: dict) -> int:
    """Runs one session; returns its exit code."""
    began = time.time()
    work = Path(settings["work"] or tempfile.gettempdir()) / "lmwright"
    work.mkdir(parents=True, exist_ok=True)
    try:
        environment = clean_environment(settings)
        environment.update(read_secrets(settings["secrets"], work))
        check_hosts(settings["hosts"])
        files = find_inputs(settings["inputs"], settings["files"])
        python = install(settings, files, work)
        library = next(work.glob("venv/lib/python*/site-packages/libtpu/libtpu.so"), None)
        if library is not None:
            environment["TPU_LIBRARY_PATH"] = str(library)
        check_devices(python, environment, settings)
    except Refusal as refusal:
        print(f"{ERROR}{refusal}", flush=True)
        return 2
    print(f"ready after {time.time() - began:.0f} s; training", flush=True)
    facts = {**settings, "began": began, "work": str(work), "files": files}
    facts["output"] = os.path.abspath(settings["output"])
    (work / "session.json").write_text(json.dumps(facts))
    command = [str(python), "-P", "-m", "lmwright.cloud.kaggle.session", str(work / "session.json")]
    return run(command, environment, work)


def clean_environment(settings: dict) -> dict:
    """Variables of this process without those that lead to the image's packages."""
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    environment["JAX_PLATFORMS"] = settings["platforms"]
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def read_secrets(names: list, work: Path) -> dict:
    """Secrets of the user's account at Kaggle as variables; a Google key as the file it is in."""
    values, missing = {}, []
    for name in names:
        value = os.environ.get(name) or secret(name)
        if not value:
            missing.append(name)
        elif name == "GOOGLE_APPLICATION_CREDENTIALS" and value.lstrip().startswith("{"):
            path = work / "google.json"
            path.touch(mode=0o600)
            path.write_text(value)
            values[name] = str(path)
        else:
            values[name] = value
    if missing:
        raise Refusal(
            f"the secret {missing[0]} is not given to this notebook; make it under Add-ons, "
            "Secrets in Kaggle's editor (in Colab under the key), attach it, and start again"
        )
    return values


def secret(name: str) -> str:
    """A secret that is attached to this notebook; empty where there is none."""
    for module, read in (
        ("kaggle_secrets", lambda module: module.UserSecretsClient().get_secret(name)),
        ("google.colab.userdata", lambda module: module.get(name)),
    ):
        try:
            return read(importlib.import_module(module)) or ""
        except Exception:  # their own, that there is no such secret; or it is another image
            continue
    return ""


def check_hosts(hosts: list) -> None:
    """Raises Refusal for hosts that cannot be reached."""
    for host in hosts:
        name, _, port = host.partition(":")
        try:
            socket.create_connection((name, int(port or 443)), CONNECT_S).close()
        except OSError as error:
            raise Refusal(
                f"{host} cannot be reached from here ({error}); turn the internet on in the "
                "notebook's settings, for which Kaggle wants your phone number verified"
            ) from None


def find_inputs(roots: list, names: list) -> dict:
    """Paths of the inputs by name, wherever they are mounted."""
    files = {}
    for root in roots:
        for folder, folders, inside in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            here = os.path.abspath(folder)
            files.update({name: os.path.join(here, name) for name in inside if name in names})
    missing = [name for name in names if name not in files]
    if missing:
        raise Refusal(
            f"{missing[0]} is not among the inputs in {', '.join(roots)}; attach the dataset or "
            "notebook output that holds it"
        )
    return files


def install(settings: dict, files: dict, work: Path) -> Path:
    """Makes an environment with the packages of the lock and this very lmwright; returns its
    Python."""
    wheels, python = work / "wheels", work / "venv" / "bin" / "python"
    marker, packages = work / "installed", " ".join(settings["packages"])
    if marker.exists() and marker.read_text() == packages:
        return python
    shutil.rmtree(wheels, ignore_errors=True)
    for name in settings["packages"]:
        with tarfile.open(files[name]) as archive:
            extract(archive, wheels)
    base = find_python(settings["python"], wheels, work)
    shutil.rmtree(work / "venv", ignore_errors=True)
    call([base, "-m", "venv", "--without-pip", str(work / "venv")])
    # pip of the image, or of the Python that came along, installs into the new environment
    pip = [base if has_pip(base) else sys.executable, "-m", "pip", "--python", str(python)]
    pip += ["install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    source = ["--find-links", str(wheels)] + (["--no-index"] if settings["no_index"] else [])
    call([*pip, *source, "--require-hashes", "-r", str(wheels / "hosts.lock")])
    call([*pip, "--no-index", *map(str, wheels.glob("lmwright-*.whl"))])
    marker.write_text(packages)
    return python


def find_python(version: str, wheels: Path, work: Path) -> str:
    """A Python of that version: the one that came along, else the image's."""
    archive = wheels / "python.tar.gz"
    if archive.exists():
        with tarfile.open(archive) as packed:
            extract(packed, work)
        return str(work / "python" / "bin" / "python3")
    if "{}.{}".format(*sys.version_info) == version:
        return sys.executable
    there = shutil.which(f"python{version}")
    if there is None:
        raise Refusal(
            f"Python {version} is not here (this is {sys.version.split()[0]}); choose another image"
        )
    return there


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpacks an archive; nothing in it may lie outside of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def has_pip(python: str) -> bool:
    """True if that Python can install packages."""
    return not subprocess.call([python, "-c", "import pip"], stderr=subprocess.DEVNULL)


def call(command: list) -> None:
    """Runs a command. Raises Refusal with its last line."""
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise Refusal(f"the packages cannot be installed here: {lines[-1]}")


def check_devices(python: Path, environment: dict, settings: dict) -> None:
    """Raises Refusal where this machine has other chips than the run was planned for."""
    command = [str(python), "-c", DEVICES]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=DEVICES_S
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"JAX found no device within {DEVICES_S} s; launch again") from None
    told = [line for line in done.stdout.splitlines() if line.count("|") == 2]
    platform, count, kind = told[-1].split("|") if told else ("none", "0", "none")
    print(f"{count} devices of platform {platform}: {kind}", flush=True)
    if platform != settings["platforms"].split(",")[0]:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Refusal(
            f"this machine has no {settings['platforms'].split(',')[0].upper()} "
            f"({lines[-1][:200] if not told else kind}); it runs on another image or accelerator "
            f"than {settings['machine']} was asked for: choose {settings['accelerator']} in the "
            "notebook's settings, and pin no Docker image"
        )
    if settings["devices"] and int(count) != settings["devices"]:
        raise Refusal(
            f"this machine has {count} devices and the run was planned for {settings['devices']}; "
            "launch again, and report it if it stays so"
        )


def run(command: list, environment: dict, work: Path) -> int:
    """Runs the session and prints what it prints; passes SIGTERM on."""
    process = subprocess.Popen(
        command, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    except ValueError:  # not in the main thread
        pass
    for line in process.stdout or ():
        print(line.decode(errors="replace"), end="", flush=True)
    return process.wait()


if __name__ == "__main__" and SETTINGS:
    code = main(SETTINGS)
    if code:
        sys.exit(code)
