"""Stage: Python, all packages and this lmwright, put into the bucket for the hosts of a slice.

    CODE/python.tar.gz   a Python that runs anywhere on Linux
    CODE/wheels.tar      every package of hosts.lock
    CODE/lmwright.tar    the wheel of the code that runs here, and hosts.lock

CODE is named by what is in it, so that what is there already is not sent again.
"""

import hashlib
import os
import tarfile
import urllib.request
from pathlib import Path

from lmwright.cloud.package import LOCK, build_wheel, download_wheels
from lmwright.errors import UserError
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.bucket import Bucket

# Builds of github.com/astral-sh/python-build-standalone; the checksum is published beside each.
PYTHON_URL = (
    "https://github.com/astral-sh/python-build-standalone/releases/download/20250409/"
    "cpython-3.12.10%2B20250409-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
)
PYTHON_VARIABLE = "LMWRIGHT_HOST_PYTHON"
PARTS = ("python.tar.gz", "wheels.tar", "lmwright.tar")
STARTUP = Path(__file__).parent / "startup.sh"


def stage(root: str) -> str:
    """Puts below `root` what is not there; returns the URL of CODE. Raises UserError."""
    with temporary_folder() as temporary:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        url = f"{root}/{code_name(wheel)}"
        bucket = Bucket(url)
        there = bucket.entries()
        if there.keys() >= set(PARTS):
            return url
        if "wheels.tar" not in there:
            (folder / "wheels").mkdir()
            download_wheels(folder / "wheels")
            _pack(folder / "wheels.tar", sorted((folder / "wheels").iterdir()))
        if "python.tar.gz" not in there:
            fetch_python(folder / "python.tar.gz")
        _pack(folder / "lmwright.tar", [wheel, LOCK])
        for name in PARTS:
            if name not in there:
                bucket.upload(folder / name, name)
    return url


def code_name(wheel: Path) -> str:
    """Name of the folder of a wheel and its lock."""
    return hashlib.sha256(wheel.read_bytes() + LOCK.read_bytes()).hexdigest()[:16]


def _pack(path: Path, files: list[Path]) -> None:
    with tarfile.open(path, "w") as archive:
        for file in files:
            archive.add(file, file.name)


def fetch_python(path: Path) -> None:
    """Takes the file that $LMWRIGHT_HOST_PYTHON names, or downloads Python."""
    if given := os.environ.get(PYTHON_VARIABLE):
        try:
            path.write_bytes(Path(given).read_bytes())
        except OSError as error:
            raise UserError(f"${PYTHON_VARIABLE}: {given}: {error.strerror}") from None
        return
    try:
        with urllib.request.urlopen(PYTHON_URL, timeout=60) as answer:
            data = answer.read()
        with urllib.request.urlopen(f"{PYTHON_URL}.sha256", timeout=60) as answer:
            published = answer.read().decode().split()[0]
    except OSError as error:
        raise UserError(
            f"the Python for the slice cannot be downloaded from {PYTHON_URL} ({error}); download "
            f"it another way and give its path: {PYTHON_VARIABLE}=FILE"
        ) from None
    if hashlib.sha256(data).hexdigest() != published:
        raise UserError(f"{PYTHON_URL}: differs from its published checksum; try again")
    path.write_bytes(data)
