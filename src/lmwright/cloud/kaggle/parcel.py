"""Parcel: everything that a session at Kaggle is given.

    wheels   Python and every package of the lock          lmwright-wheels-HASH.lmw
    code     this very lmwright, and the lock              lmwright-code-HASH.lmw
    data     the prepared store, and what `init_from` names
    run      the run directory, if there is one already

Each is one archive and one private dataset, named by what is in it, so that what is there already
is not sent again. Places in buckets and on the hub are read from where they are.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
import xxhash

from lmwright.cloud.kaggle.session import ENDING, newest_step
from lmwright.cloud.package import LOCK, PYTHON, build_wheel, download_wheels
from lmwright.cloud.stage import fetch_python
from lmwright.config.fields import to_plain
from lmwright.config.run import Run
from lmwright.config.text import join_keys
from lmwright.data.manifest import MANIFEST
from lmwright.data.portions import PORTIONS, local_folders, parse_portions, refuse_unfinished
from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.storage.bucket import is_bucket

PLACEHOLDER = "/@lmwright@"
"""Placeholder for the folder of the session in the run file."""
STAGES = ("tokenizer", "pack", "shuffle")
"""Stages of a store that training reads."""
HUB = "huggingface.co"
BUCKETS = "storage.googleapis.com"
GOOGLE_KEY, HUB_TOKEN, WANDB_KEY = "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN", "WANDB_API_KEY"
WHEELS = "wheels"
DIGITS = 16
BLOCK = 1 << 22


@dataclass(frozen=True)
class Archive:
    """Files that travel together."""

    kind: str
    """One of wheels, code, data, init, adapter, run."""
    digest: str
    files: tuple[tuple[Path, str], ...] = ()
    """Files here and their names in the archive; of `wheels` they are downloaded when needed."""
    folder: str = ""
    """Folder into which the session unpacks it."""

    @property
    def slug(self) -> str:
        return f"lmwright-{self.kind}-{self.digest[:DIGITS]}"

    @property
    def name(self) -> str:
        return self.slug + ENDING

    @property
    def size(self) -> int:
        """Bytes of its files; 0 for those that are still to be downloaded."""
        return sum(path.stat().st_size for path, _ in self.files)

    def write(self, folder: Path) -> Path:
        """Writes the archive into a folder, whole or not at all."""
        path = folder / self.name
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with TemporaryDirectory(prefix="lmwright-wheels-", dir=folder.parent) as temporary:
            files = self.files or _wheels(Path(temporary))
            with tarfile.open(part, "w") as archive:
                for file, name in files:
                    archive.add(file, name)
        part.rename(path)
        return path


@dataclass(frozen=True)
class Parcel:
    """Archives, run file and conditions of a run at Kaggle."""

    archives: tuple[Archive, ...]
    run: str
    """The run file, with the placeholder for the folder of the session."""
    dir: str
    """Run directory there."""
    secrets: tuple[str, ...]
    """Names of secrets that have to be attached to the notebook."""
    hosts: tuple[str, ...]
    """Hosts that have to be reached."""


def pack(run: Run, folder: Path) -> Parcel:
    """The parcel of a run; the wheel is written into a folder. Raises UserError for a run that
    cannot be sent."""
    refuse_unsent(run)
    plain = to_plain(run)
    archives = [_wheelhouse(), _code(folder)]
    places = list(_places(plain))
    for keys, place in places:
        if _is_local(place):
            archive = _place_archive(keys, place, len(archives))
            archives.append(archive)
            name = (
                archive.folder
                if Path(place).expanduser().is_dir()
                else (f"{archive.folder}/{Path(place).name}")
            )
            _put(plain, keys, f"{PLACEHOLDER}/{name}")
    if not is_bucket(run.dir):
        if newest_step(run.dir):
            archives.append(_archive("run", Path(run.dir), "run"))
        plain["dir"] = f"{PLACEHOLDER}/run"
    outside = [str(place) for _, place in places] + [run.dir]
    buckets = any(is_bucket(place) for place in outside)
    hub = any(place.startswith("hf://") for place in outside)
    publishes = run.train.publish_every_steps is not None
    wandb = "wandb" in run.metrics.trackers
    secrets = [GOOGLE_KEY] * buckets + [HUB_TOKEN] * publishes + [WANDB_KEY] * wandb
    hosts = [BUCKETS] * buckets + [HUB] * (hub or publishes) + ["api.wandb.ai"] * wandb
    return Parcel(
        tuple(archives),
        tomli_w.dumps(redact_tree(plain)),
        plain["dir"],
        tuple(secrets),
        tuple(hosts),
    )


def refuse_unsent(run: Run) -> None:
    """Raises UserError for files of a run that are not here, or cannot be read at Kaggle."""
    for keys, place in _places(to_plain(run)):
        name = join_keys(keys)
        if "://" in place:
            if not place.startswith(("gs://", "hf://")):
                raise UserError(f"{name}: {place} cannot be read at Kaggle; use gs:// or a folder")
            continue
        path = Path(place).expanduser()
        if not path.exists():
            cure = "run `lmwright prepare` first" if keys[-1] in ("dir", "data") else "check it"
            raise UserError(f"{name}: {place} is not here, and cannot be sent to Kaggle; {cure}")
        if keys[-1] in ("dir", "data") and (path / PORTIONS).exists():
            told = parse_portions((path / PORTIONS).read_bytes(), place)
            refuse_unfinished(told, f"{name}: {place}", "Kaggle gets them once")
            continue
        if keys[-1] in ("dir", "data") and not (path / "shuffle" / MANIFEST).exists():
            raise UserError(
                f"{name}: {place} is not prepared; run `lmwright prepare` here first, since hours "
                "with a TPU are too scarce for that, or name a store in a bucket"
            )


def _places(plain: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Fields of a run whose files training reads."""
    fields: list[tuple[str | int, ...]] = [("data", "dir"), ("train", "init_from")]
    lora = plain.get("lora") or {}
    fields += [("lora", "init_from"), ("objective", "generator_from"), ("objective", "teacher")]
    for number in range(len(lora.get("adapters") or ())):
        fields += [("lora", "adapters", number, "data"), ("lora", "adapters", number, "init_from")]
    for keys in fields:
        value: Any = plain
        for key in keys:
            value = value[key] if isinstance(key, int) else (value or {}).get(key)
        if value:
            yield keys, str(value)


def _put(plain: dict[str, Any], keys: tuple[str | int, ...], value: str) -> None:
    target: Any = plain
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value


def _is_local(place: str) -> bool:
    return "://" not in place


def _place_archive(keys: tuple[str | int, ...], place: str, number: int) -> Archive:
    path = Path(place).expanduser()
    if keys[-1] in ("dir", "data"):
        folders = [folder.relative_to(path) for folder in local_folders(path)]
        below = [str(folder / stage) for folder in folders for stage in STAGES]
        return _archive("data", path, f"data-{number}", (PORTIONS, *below))
    return _archive("init", path, f"init-{number}")


def _archive(kind: str, place: Path, folder: str, below: tuple[str, ...] = ()) -> Archive:
    """Archive of a file or a folder, of which some sub-folders may be enough."""
    if place.is_file():
        files = [(place, place.name)]
    else:
        roots = [place / name for name in below] or [place]
        below_roots = (path for root in roots for path in (root, *root.rglob("*")))
        members = (path for path in below_roots if path.is_file())
        files = sorted((path, path.relative_to(place).as_posix()) for path in members)
    digest = xxhash.xxh3_128()
    for path, name in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return Archive(kind, digest.hexdigest(), tuple(files), folder)


def _wheelhouse() -> Archive:
    digest = xxhash.xxh3_128(LOCK.read_bytes() + PYTHON.encode())
    return Archive(WHEELS, digest.hexdigest())


def _code(folder: Path) -> Archive:
    wheel = build_wheel(folder)
    digest = xxhash.xxh3_128(wheel.read_bytes() + LOCK.read_bytes()).hexdigest()
    return Archive("code", digest, ((wheel, wheel.name), (LOCK, LOCK.name)))


def _wheels(folder: Path) -> list[tuple[Path, str]]:
    """Downloads Python and the packages of the lock."""
    download_wheels(folder)
    fetch_python(folder / "python.tar.gz")
    return [(path, path.name) for path in sorted(folder.iterdir())]
