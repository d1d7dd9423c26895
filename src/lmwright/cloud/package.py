"""Package: this very version of lmwright and all it needs, to be carried to another machine.

wheel          of the code that runs here, local changes included
wheelhouse     every package of the lock for the machine, so that it needs no internet
"""

import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import lmwright
from lmwright.errors import UserError

LOCK = Path(__file__).parent / "hosts.lock"
PYTHON = "3.12"  # of the machines; the images of TPU hosts have 3.10
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64")
PLATFORMS += ("manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_12_x86_64")
LONG_AGO = (2020, 1, 1, 0, 0, 0)  # so that the same code gives the same bytes


def build_wheel(folder: Path) -> Path:
    """Writes a wheel of the running package into a folder; the same code gives the same bytes."""
    version = metadata.version("lmwright")
    info = f"lmwright-{version}.dist-info"
    package = Path(lmwright.__file__).parent
    files = {
        f"lmwright/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    distribution = metadata.distribution("lmwright")
    files[f"{info}/METADATA"] = (distribution.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: lmwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"lmwright-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return path


def download_wheels(folder: Path) -> None:
    """Downloads every wheel of the lock for a host. Raises UserError with pip's last line, or where
    there is no pip, as in an environment that uv has made."""
    if find_spec("pip") is None:
        raise UserError(
            f"the packages for the slice are downloaded by pip, which {sys.prefix} lacks; run: "
            f"{sys.executable} -m ensurepip"
        )
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    words += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "-r", str(LOCK)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise UserError(f"the packages for the slice cannot be downloaded: {lines[-1]}")


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
