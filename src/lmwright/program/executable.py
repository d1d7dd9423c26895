"""Executable: the train step that `plan` compiled, kept so that `train` need not compile it again.

    plan, no TPU      lower --> compile for the slice --> serialize --> ~/.cache/lmwright/steps/KEY
    train, the slice  lower --> the same KEY? load --> run                (or compile, as ever)

The key is a hash of the program before compilation (`program.text`), the devices (kind, number,
place on the torus), the compiler's options and the versions of JAX and the compiler. KEY.json
beside it says what it was made of, so that `train` can say what differs. Whatever does not fit,
cannot be read or will not load is compiled anew. An entry is code: it is taken only from a
file and folders that nobody else may write, see `lmwright.guard.private`.
"""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import zstandard

from lmwright.config.run import Run
from lmwright.core.param import Tree
from lmwright.core.processes import of_all
from lmwright.errors import UserError, first_line
from lmwright.guard.files import write_whole
from lmwright.guard.private import make_private, read_private
from lmwright.program.cache import PACKAGES, cache_folder
from lmwright.program.kept import Made, difference
from lmwright.program.text import fingerprint

FORMAT = 2
ENTRIES = 20  # some 10 MB each; the oldest go
NOTE = ".json"  # of the file beside an entry
DIGEST = hashlib.sha256().digest_size
PRIVATE = 0o600  # whatever the umask: an entry that others may write is not read


def folder() -> Path:
    """Folder of the entries: `$XDG_CACHE_HOME/lmwright/steps`."""
    return cache_folder().parent / "steps"


def made_of(
    program: str, devices: Sequence[Any], options: dict[str, str], run: Run | None = None
) -> Made:
    """Everything a compiled step depends on: the text of a lowered program, the devices of the mesh
    in order, options, versions; and the run that it was lowered from, to explain differences."""
    places = [
        (d.id, d.device_kind, _plain(getattr(d, "coords", None)), getattr(d, "core_on_chip", None))
        for d in devices
    ]
    return Made.of(fingerprint(program), places, options, _versions(), run)


def _plain(coords: Any) -> Any:
    return None if coords is None else tuple(map(int, coords))


def key_of(program: str, devices: Sequence[Any], options: dict[str, str]) -> str:
    """The name of an entry, for a lowered program's text and the mesh's devices in order."""
    return _key(made_of(program, devices, options))


def _key(made: Made) -> str:
    told = json.dumps([FORMAT, made.program, made.devices, made.options, made.versions],
                      sort_keys=True)  # fmt: skip
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def save(key: str, compiled: jax.stages.Compiled, made: Made | None = None) -> bool:
    """Stores a compiled step and what it was made of. Returns True if it was stored; what JAX
    cannot serialize and a folder that cannot be written to are no errors."""
    from jax.experimental.serialize_executable import serialize

    home = folder()
    try:
        packed = zstandard.compress(serialize(compiled)[0])
        if make_private(home):
            return False
        write_whole(home / key, hashlib.sha256(packed).digest() + packed, PRIVATE)
        if made is not None:
            write_whole(home / f"{key}{NOTE}", made.to_json(), PRIVATE)
        entries = [p for p in home.glob("[0-9a-f]*") if not p.name.endswith(NOTE)]
        for old in sorted(entries, key=lambda p: p.stat().st_mtime)[:-ENTRIES]:
            old.unlink(missing_ok=True)
            old.with_name(old.name + NOTE).unlink(missing_ok=True)
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


def exists(key: str) -> bool:
    """True if there is an entry."""
    return (folder() / key).exists()


def load(
    key: str, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """The compiled step of an entry on these devices. Raises FileNotFoundError where there is
    none, and whatever the runtime raises for one that it cannot load."""
    from jax.experimental.serialize_executable import deserialize_and_load

    packed = _trusted_bytes(folder() / key)
    return deserialize_and_load(
        zstandard.decompress(packed),
        lowered.in_tree,
        lowered.out_tree,
        backend=devices[0].client,
        execution_devices=list(devices),
    )


def _trusted_bytes(path: Path) -> bytes:
    """Content of an entry. Raises ValueError if it is damaged or others may have written it."""
    content = read_private(path)
    told, packed = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(packed).digest() != told:
        raise ValueError("its file is damaged")
    return packed


@dataclass(frozen=True)
class Ready:
    """A step that can run."""

    compiled: jax.stages.Compiled
    by_plan: bool
    """True if `plan` had compiled it."""
    reason: str = ""
    """Reason why it was compiled although `plan` had kept one for this run; empty where it had
    not."""


def takes(compiled: jax.stages.Compiled, state: Tree) -> bool:
    """True if a compiled step accepts this state as its first argument.

    XLA packs int4 inside a program for CPUs, JAX's arrays report a layout that is not packed, and
    a compiled program refuses arguments that differ in that, while a jitted function converts.
    """
    wanted = jax.tree.leaves(compiled.input_formats[0][0])
    given = jax.tree.leaves(state)
    return not any(
        leaf.dtype in (jnp.int4, jnp.uint4) and leaf.format.layout != format.layout
        for leaf, format in zip(given, wanted, strict=True)
    )


def load_or_compile(
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device],
    options: dict[str, str],
    run: Run | None = None,
) -> Ready:
    """The step that `plan` kept, or else a compiled one. Of several processes all load it or
    all compile."""
    made = made_of(lowered.as_text(), devices, options, run)
    step, reason = None, ""
    try:
        step = load(_key(made), lowered, devices)
    except FileNotFoundError:
        reason = difference(made, notes())
    except Exception as error:  # whatever another runtime says of it: it is compiled instead
        reason = f"the step that plan kept cannot be loaded: {first_line(error)}"
    every = of_all(step is not None).all()
    if step is not None and not every:
        step, reason = None, "another host does not have the step that plan kept"
    if step is not None:
        return Ready(step, True)
    return Ready(lowered.compile(), False, reason)


def notes() -> list[Made]:
    """Descriptions of the kept steps, the newest first."""
    try:
        paths = [p for p in folder().glob(f"*{NOTE}") if p.with_suffix("").exists()]
        paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [made for path in paths if (made := Made.read(path)) is not None]


def refuse_option(text: str) -> None:
    """Raises UserError where the compiler's message is about an option of the run."""
    if unknown := re.search(r"No such compile option: '([^']*)'", text):
        raise UserError(
            f"train.compiler_options.{unknown[1]}: this compiler has no such option; remove it"
        )
    if wrong := re.search(r"While setting option (\w+), '(.*)' is not a valid (\w+)", text):
        raise UserError(
            f"train.compiler_options.{wrong[1]}: {wrong[2]!r} is not a valid "
            f"{wrong[3]}; correct or remove it"
        )


def refuse_options(run: Run, platform: str) -> None:
    """Raises UserError for compiler options of GPUs elsewhere."""
    theirs = [name for name in run.train.compiler_options if name.startswith("xla_gpu_")]
    if theirs and platform != "gpu":
        raise UserError(
            f"train.compiler_options.{theirs[0]}: is for GPUs, not {platform}; remove it"
        )
