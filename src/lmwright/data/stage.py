"""Stage: runs independent parts in parallel processes so that it can be killed at any moment.

    parts --work(part, tmp_dir)--> tmp/part-00007/... --fsync, rename--> <stage>/...
                                                      --then--> parts/part-00007.json
    all markers there -----------------------------------------> manifest.json

A part is done when its marker is there; a rerun does only the others. Nothing that is
written depends on how many workers ran or in which order the parts ended.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import lmwright
from lmwright.data.draw import Draw, Fixed
from lmwright.data.dropped import read_dropped, refuse_dropped, restore
from lmwright.data.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    add_counts,
    dump_json,
    files_below,
    hash_file,
    read_manifest,
)
from lmwright.data.progress import Progress
from lmwright.data.workers import worker_pool
from lmwright.errors import UserError
from lmwright.guard.files import NO_SPACE, remove_leftovers, sync, try_lock, write_whole
from lmwright.hardware.devices import cores_here

Work = Callable[[Any, Path], dict[str, Any]]
Finish = Callable[[list[dict[str, Any]], Path], dict[str, Any]]

STATE = "stage.json"
NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def run_stage(
    name: str,
    folder: str | os.PathLike,
    parts: Sequence[Any],
    work: Work,
    *,
    fingerprint: Mapping[str, Any],
    inputs: Mapping[str, Manifest] | None = None,
    facts: Mapping[str, Any] | None = None,
    finish: Finish | None = None,
    draw: Draw | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    unit: str = "tokens",
    private: bool = False,
) -> Manifest:
    """Makes `folder` hold the output of every part, or returns at once if it already does.

    work: a module-level function (processes are spawned) called as `work(part, tmp_dir)`;
        writes its files below tmp_dir under the names they will have below `folder` (no two
        parts may write the same name) and returns its counts: numbers, lists, nested dicts.
    fingerprint: JSON; everything the output depends on, the list of parts included. When it
        or an input's manifest differs from what is there, the stage is redone from scratch.
    facts: JSON stored in the manifest. finish: called as `finish(counts of each part,
        tmp_dir)` in this process after all parts; writes further files, also in the place of
        some of the parts', may change the counts in place, and returns more facts.
    draw: which of the parts are made; all if None.
    workers: processes; all cores if None; 1 runs in this process.
    unit: the count whose rate is shown. private: only the user may read what is written.
    Raises UserError for a full disk, a folder that cannot be written or is not a stage's;
    DroppedError for an input whose files are gone; UserErrors of `work` pass through. Any failure
    leaves a state that a rerun takes up.
    """
    folder = Path(folder).absolute()
    wanted = _describe_wanted(name, len(parts), fingerprint, inputs)
    # before the lock: a finished stage may lie on a read-only disk
    if finished := _find_finished(folder, wanted):
        return finished
    refuse_dropped(inputs or {})
    with _folder_errors(folder), _umask(0o077 if private else 0), _lock(folder):
        if not _open_folder(folder, wanted):
            return read_manifest(folder)
        markers = ((i, _read_marker(folder, i)) for i in range(len(parts)))
        done = {i: marker["counts"] for i, marker in markers if marker}
        draw = draw or Fixed(parts)
        progress = progress or Progress()
        progress.start(name, draw.expected(done), len(done), unit)
        try:
            _run_parts(folder, draw, done, work, workers or cores_here(), progress)
        finally:
            progress.finish()
        used = draw.used(done)
        _remove_parts(folder, done.keys() - set(used))
        return _write_manifest(folder, wanted, used, dict(facts or {}), finish)


def find_finished_stage(
    name: str,
    folder: str | os.PathLike,
    parts: int,
    *,
    fingerprint: Mapping[str, Any],
    inputs: Mapping[str, Manifest] | None = None,
) -> Manifest | None:
    """Manifest of the stage if `run_stage` would find it finished, else None; runs nothing."""
    return _find_finished(
        Path(folder).absolute(), _describe_wanted(name, parts, fingerprint, inputs)
    )


def _describe_wanted(
    name: str, parts: int, fingerprint: Mapping[str, Any], inputs: Mapping[str, Manifest] | None
) -> dict[str, Any]:
    sources = {k: m.hash for k, m in sorted((inputs or {}).items())}
    wanted = {"stage": name, "parts": parts, "fingerprint": dict(fingerprint)}
    return json.loads(dump_json({**wanted, "inputs": sources, "format": FORMAT}))


def _find_finished(folder: Path, wanted: dict[str, Any]) -> Manifest | None:
    """Manifest of the stage if it is the requested one, complete, with every file of its size."""
    if _read_json(folder / STATE) != wanted:
        return None
    if dropped := read_dropped(folder):
        return dropped
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(folder)
    except UserError:
        return None  # a damaged one is written again, from the parts
    whole = all(_has_size(folder / f, e["bytes"]) for f, e in manifest.files.items())
    return manifest if whole else None


def _open_folder(folder: Path, wanted: dict[str, Any]) -> bool:
    """Prepares the folder to start or resume a stage; False if the stage is finished already."""
    state = folder / STATE
    remove_leftovers(folder)
    present = [p for p in folder.iterdir() if p.name != ".lock"]
    if present and not state.exists():
        raise UserError(
            f"{folder} holds files that are not a stage's ({present[0].name}); "
            "remove them or choose another data.dir"
        )
    if _read_json(state) != wanted:
        _clear(folder)
        write_whole(state, dump_json(wanted))
    elif _find_finished(folder, wanted):
        return False
    # a finished stage that lost or cut a file is taken up like an interrupted one
    (folder / MANIFEST).unlink(missing_ok=True)
    restore(folder)
    (folder / "parts").mkdir(exist_ok=True)
    remove_leftovers(folder / "parts")
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    return True


def _clear(folder: Path) -> None:
    """Empties a stage; stage.json goes last, so that a kill in between leaves it resumable."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if (folder / "parts").exists():
        shutil.rmtree(folder / "parts")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (STATE, ".lock"):
            path.unlink()
    (folder / STATE).unlink(missing_ok=True)


def _run_parts(
    folder: Path,
    draw: Draw,
    done: dict[int, dict[str, Any]],
    work: Work,
    workers: int,
    progress: Progress,
) -> None:
    """Makes the parts that are drawn and not done yet; puts their counts into `done`."""
    workers = min(workers, draw.left(done))
    if workers <= 1:
        while drawn := draw.next(done, set()):
            index, part = drawn
            _note_done(index, _run_part(folder, index, part, work), draw, done, progress)
        return
    try:
        with worker_pool(workers) as submit:
            running: dict[Future, int] = {}
            while True:
                busy = set(running.values())
                while len(running) < 2 * workers and (drawn := draw.next(done, busy)):
                    index, part = drawn
                    running[submit(_run_part, folder, index, part, work)] = index
                    busy.add(index)
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    _note_done(running.pop(future), future.result(), draw, done, progress)
    except BrokenProcessPool:
        raise UserError(
            f"{folder}: a worker process died, most likely out of memory; run again with a "
            "smaller data.workers (finished parts are kept)"
        ) from None


def _note_done(
    index: int, counts: dict[str, Any], draw: Draw, done: dict[int, Any], progress: Progress
) -> None:
    again = index in done
    done[index] = counts
    if not again:
        progress.advance(counts)
    progress.expect(draw.expected(done))


def _run_part(folder: Path, index: int, part: Any, work: Work) -> dict[str, Any]:
    """Runs one part and publishes its files, the marker last."""
    temp = folder / "tmp" / f"part-{index:05d}.{os.getpid()}"
    temp.mkdir(parents=True)
    try:
        counts = work(part, temp)
        files = _publish(temp, folder)
        write_whole(_marker(folder, index), dump_json({"counts": counts, "files": files}))
        return counts
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _publish(temp: Path, folder: Path) -> dict[str, Any]:
    """Moves the files below `temp` to their places below `folder`, durably."""
    files, parents = {}, set()
    for path in files_below(temp):
        name = path.relative_to(temp).as_posix()
        sync(path)
        files[name] = {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        parents.add(target.parent)
    for parent in parents:
        sync(parent)
    return files


def _remove_parts(folder: Path, numbers: Iterable[int]) -> None:
    """Removes finished parts, their markers first."""
    for index in sorted(numbers):
        marker = _read_marker(folder, index)
        _marker(folder, index).unlink(missing_ok=True)
        for name in marker["files"] if marker else ():
            (folder / name).unlink(missing_ok=True)


def _write_manifest(
    folder: Path,
    wanted: dict[str, Any],
    parts: Sequence[int],
    facts: dict[str, Any],
    finish: Finish | None,
) -> Manifest:
    markers = [_read_marker(folder, i) for i in parts]
    files: dict[str, Any] = {}
    for i, marker in zip(parts, markers, strict=True):
        if marker is None or files.keys() & marker["files"].keys():
            raise RuntimeError(f"{folder}: part {i} lost its files or wrote those of another part")
        files |= marker["files"]
    counts = [m["counts"] for m in markers]
    if finish:
        temp = folder / "tmp" / f"finish.{os.getpid()}"
        temp.mkdir(parents=True)
        facts |= finish(counts, temp)
        files |= _publish(temp, folder)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    manifest = Manifest(
        stage=wanted["stage"],
        fingerprint={k: wanted[k] for k in ("fingerprint", "inputs", "parts")},
        counts=functools.reduce(add_counts, counts, {}),
        facts=facts,
        files=files,
        versions={"lmwright": lmwright.__version__, "format": FORMAT},
    )
    write_whole(folder / MANIFEST, manifest.to_json())
    return read_manifest(folder)


def _marker(folder: Path, index: int) -> Path:
    return folder / "parts" / f"part-{index:05d}.json"


def _read_marker(folder: Path, index: int) -> dict[str, Any] | None:
    """Marker of a part if all its files exist with their sizes, else None."""
    marker = _read_json(_marker(folder, index))
    try:
        files = marker["files"].items()
        outside = any(f.startswith("/") or ".." in f.split("/") for f, _ in files)
        whole = isinstance(marker["counts"], dict) and not outside
        whole = whole and all(_has_size(folder / f, e["bytes"]) for f, e in files)
        return marker if whole else None
    except (TypeError, KeyError, AttributeError, ValueError):
        return None  # none, or a damaged one: the part is made again


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the stage; the lock ends with its holder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        what = "a link to nowhere" if file.is_symlink() else "a file, not a folder"
        raise UserError(f"data.dir: {file} is {what}; choose another") from None
    except OSError as e:
        if e.errno in NO_SPACE + NOT_ALLOWED:
            raise
        raise UserError(
            f"data.dir: {folder} cannot be made ({e.strerror}); choose another"
        ) from None
    with open(folder / ".lock", "a") as f:
        if not try_lock(f):
            raise UserError(
                f"{folder}: another process is preparing this folder; wait for it or stop it"
            )
        yield


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Removes permissions from files made here and in the processes started here."""
    before = os.umask(0o077)  # it can only be read by setting it
    os.umask(before | mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the disk into a UserError that names the folder."""
    try:
        yield
    except OSError as e:
        if e.errno in NO_SPACE:
            raise UserError(
                f"{folder}: no space left on this disk ({e.strerror}); free some space and run "
                "again (finished parts are kept), or choose another data.dir"
            ) from None
        if e.errno not in NOT_ALLOWED:
            raise
        name = str(e.filename or folder)
        if not name.startswith(str(folder)) and not str(folder).startswith(name):
            raise UserError(f"{name}: {e.strerror}; check its permissions") from None
        raise UserError(
            f"{folder}: cannot write here ({e.strerror}); "
            "make it writable or choose another data.dir"
        ) from None
