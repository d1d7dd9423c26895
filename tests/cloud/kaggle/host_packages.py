"""A wheel in place of a whole wheelhouse: it shows the packages of the Python that runs the tests,
so that the real script installs and trains without a download."""

import hashlib
import sys
import zipfile
from pathlib import Path

import jax

from lmwright.cloud.kaggle import launch, parcel

INFO = "host_packages-1.0.dist-info"


def use_packages_of_this_python(monkeypatch, folder: Path) -> Path:
    """Makes what is launched use the wheel, its lock, and this Python."""
    folder.mkdir()
    wheel = folder / "host_packages-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("host.pth", f"{Path(jax.__file__).parents[1]}\n")
        file.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: host-packages\nVersion: 1.0\n"
        )
        file.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = ("host.pth", *(f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD")))
        file.writestr(f"{INFO}/RECORD", "".join(f"{name},,\n" for name in names))
    lock = folder.parent / "hosts.lock"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"host-packages==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(parcel, "LOCK", lock)
    monkeypatch.setattr(
        parcel, "download_wheels", lambda to: (to / wheel.name).write_bytes(wheel.read_bytes())
    )
    monkeypatch.setattr(parcel, "fetch_python", lambda path: None)
    monkeypatch.setattr(launch, "PYTHON", "{}.{}".format(*sys.version_info))
    return wheel
