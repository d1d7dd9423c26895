"""Executable: the train step that `plan` compiled, kept so that `train` need not compile it again.

    plan, no TPU      lower --> compile for the slice --> serialize --> ~/.cache/lmwright/steps/KEY
    train, the slice  lower --> the same KEY? load --> run                (or compile, as ever)

The key is a hash of the program before compilation, the devices (kind, number, place on the
torus), the compiler's options and the versions of JAX and the compiler. Whatever does not fit,
cannot be read or will not load is compiled anew. An entry is code: it is taken only from a
file that belongs to the user and that nobody else may write.
"""

import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zstandard

from lmwright.plan.cache import PACKAGES, cache_folder

FORMAT = 1
ENTRIES = 20  # some 10 MB each; the oldest go
DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where entries are: `$XDG_CACHE_HOME/lmwright/steps`."""
    return cache_folder().parent / "steps"


def key_of(program: str, devices: Sequence[Any], options: dict[str, str]) -> str:
    """The name of an entry, for a lowered program's text and the mesh's devices in order."""
    places = [
        (d.id, d.device_kind, getattr(d, "coords", None), getattr(d, "core_on_chip", None))
        for d in devices
    ]
    told = json.dumps([FORMAT, program, places, options, _versions()], sort_keys=True, default=list)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def save(key: str, compiled: jax.stages.Compiled) -> bool:
    """Keeps a compiled step; whether it is kept. What JAX cannot serialize and a folder that
    cannot be written to are no errors."""
    from jax.experimental.serialize_executable import serialize

    home = folder()
    try:
        packed = zstandard.compress(serialize(compiled)[0])
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(packed).digest() + packed)
        os.replace(file.name, home / key)
        for old in sorted(home.glob("[0-9a-f]*"), key=lambda p: p.stat().st_mtime)[:-ENTRIES]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


def exists(key: str) -> bool:
    """Whether there is an entry."""
    return (folder() / key).exists()


def load(
    key: str, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]
) -> jax.stages.Compiled | None:
    """The compiled step of an entry on these devices; None where there is none that loads."""
    from jax.experimental.serialize_executable import deserialize_and_load

    try:
        packed = _trusted_bytes(folder() / key)
        return deserialize_and_load(
            zstandard.decompress(packed),
            lowered.in_tree,
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=list(devices),
        )
    except Exception:  # whatever another runtime says of it: it is compiled instead
        return None


def _trusted_bytes(path: Path) -> bytes:
    """What an entry holds. Raises ValueError where it is damaged or others may have written it."""
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"{path}: others may write it")
        told, packed = file.read(DIGEST), file.read()
    if hashlib.sha256(packed).digest() != told:
        raise ValueError(f"{path}: damaged")
    return packed


def load_or_compile(
    lowered: jax.stages.Lowered, devices: Sequence[jax.Device], options: dict[str, str]
) -> tuple[jax.stages.Compiled, bool]:
    """The compiled step, and whether `plan` had compiled it. Of several processes all load it
    or all compile."""
    found = load(key_of(lowered.as_text(), devices, options), lowered, devices)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        every = multihost_utils.process_allgather(np.array(found is not None))
        found = found if every.all() else None
    return (found, True) if found is not None else (lowered.compile(), False)
