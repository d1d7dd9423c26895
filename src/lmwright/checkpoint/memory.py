"""Memory: a tier of checkpoints in the host's memory, for processes that die while the host lives.

    /dev/shm/lmwright-UID/KEY/host-N/STEP    header (JSON), then the bytes of this process's shards

KEY is of the run's directory and of a token in it, so that a directory that is made anew does not
find the states of the one before. Every process keeps its own shards, so a step counts only if all
processes have it, on the same devices, and it is newer than the newest checkpoint. Nothing here
replaces a checkpoint: what cannot be used is passed over.
"""

import hashlib
import json
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from lmwright.core.param import Tree
from lmwright.core.processes import from_first, of_all
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.guard.private import make_private

VARIABLE = "LMWRIGHT_MEMORY"
DEFAULT = "/dev/shm"
TOKEN = ".memory"
KEPT = 2
ROOM = 1.1  # of a state, that must be free before another one is kept
NONE = -1


class MemoryTier:
    """States of this process in the host's memory."""

    def __init__(self, run_dir: Path):
        """Opens the tier. Raises UserError on a system without such memory."""
        root = Path(os.environ.get(VARIABLE, DEFAULT))
        if not root.is_dir():
            raise UserError(
                f"checkpoint.memory_every_steps: there is no {root} here to keep states in; "
                "remove it"
            )
        key = hashlib.sha256(f"{run_dir.absolute()} {_token(run_dir)}".encode()).hexdigest()[:24]
        self._run = root / f"lmwright-{os.getuid()}" / key
        if problem := make_private(self._run):  # anybody may make folders in /dev/shm
            raise UserError(
                f"checkpoint.memory_every_steps: {problem}, or set {VARIABLE} to another folder"
            )
        self._folder = self._run / f"host-{jax.process_index()}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._folder.glob("*.tmp"):
            left.unlink()
        self._thread: threading.Thread | None = None

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> bool:
        """Keeps a state; returns once it is copied off the devices. False where the memory is too
        small for another one."""
        self.wait()
        pieces = list(_pieces(state))
        for _, _, shard in pieces:
            shard.copy_to_host_async()
        arrays = [np.asarray(shard) for _, _, shard in pieces]
        size = sum(array.nbytes for array in arrays)
        if shutil.disk_usage(self._folder).free < ROOM * size:
            return False
        entries = [
            {"leaf": leaf, "index": index, "nbytes": array.nbytes}
            for (leaf, index, _), array in zip(pieces, arrays, strict=True)
        ]
        header = {"layout": layout(state), "meta": meta | {"step": step}, "entries": entries}
        self._thread = threading.Thread(target=self._write, args=(step, header, arrays))
        self._thread.start()
        return True

    def wait(self) -> None:
        """Returns once the last state is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        temporary = self._folder / f"{step}.tmp"
        crc = 0
        for array in arrays:
            crc = zlib.crc32(_bytes(array), crc)
        line = json.dumps(header | {"crc": crc}).encode() + b"\n"
        try:
            with open(temporary, "wb") as file:
                os.chmod(temporary, 0o600)
                file.write(line)
                for array in arrays:
                    file.write(_bytes(array))
            os.replace(temporary, self._folder / str(step))
        except OSError:  # others have taken the memory meanwhile
            temporary.unlink(missing_ok=True)
            return
        # later ones are of a session whose devices were others: their steps are done again
        kept = [other for other in self.steps() if other <= step][-KEPT:]
        for other in set(self.steps()) - set(kept):
            (self._folder / str(other)).unlink()

    def steps(self) -> list[int]:
        """Steps that this process keeps, oldest first."""
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def restore(self, abstract: Tree, newer_than: int) -> tuple[Tree, dict[str, Any]] | None:
        """State and meta of the newest step that all processes keep on the devices of `abstract`;
        None where there is none after `newer_than`."""
        mine = [step for step in self.steps() if step > newer_than][-KEPT:]
        everyone = of_all(np.array([*mine, *[NONE] * (KEPT - len(mine))], np.int64))
        common = set.intersection(*(set(row.tolist()) for row in everyone)) - {NONE}
        for step in sorted(common, reverse=True):
            restored = self._read(step, abstract)
            if of_all(restored is not None).all():
                return restored
        return None

    def _read(self, step: int, abstract: Tree) -> tuple[Tree, dict[str, Any]] | None:
        try:
            with open(self._folder / str(step), "rb") as file:
                header = json.loads(file.readline())
                data = file.read()
        except (OSError, ValueError):
            return None
        if header["layout"] != layout(abstract) or zlib.crc32(data) != header["crc"]:
            return None
        pieces, at = {}, 0
        for entry in header["entries"]:
            pieces[entry["leaf"], entry["index"]] = at
            at += entry["nbytes"]
        leaves, tree = jax.tree.flatten(abstract)
        arrays = [_placed(leaf, number, pieces, data) for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays), header["meta"]

    def clear(self) -> None:
        """Removes what this process keeps."""
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._run.rmdir()  # the last process
        except OSError:
            return


def layout(tree: Tree) -> str:
    """Digest of shapes, types and placement of a state, or of its abstract one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    text = [
        f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} "
        f"{[(device.id, str(index)) for device, index in _placement(leaf)]}"
        for path, leaf in leaves
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _placement(leaf: Any) -> list[tuple[jax.Device, Any]]:
    """Devices of this process with the part of the array that each holds."""
    parts = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return sorted(parts.items(), key=lambda item: item[0].id)


def _pieces(state: Tree) -> Iterator[tuple[int, str, jax.Array]]:
    """(number of the leaf, its part, array) of every part that this process holds, each once."""
    for number, leaf in enumerate(jax.tree.leaves(state)):
        seen = set()
        for shard in leaf.addressable_shards:
            index = str(shard.index)
            if index not in seen:
                seen.add(index)
                yield number, index, shard.data


def _placed(leaf: Any, number: int, pieces: dict[tuple[int, str], int], data: bytes) -> jax.Array:
    """The array of a leaf, from the bytes of its parts; in the memory of its sharding, which for
    moments may be the host's (`optim.offload`)."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    count, memory = int(np.prod(shape)), leaf.sharding.memory_kind
    arrays = [
        jax.device_put(
            np.frombuffer(data, leaf.dtype, count, pieces[number, str(index)]).reshape(shape),
            SingleDeviceSharding(device, memory_kind=memory),
        )
        for device, index in _placement(leaf)
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _token(run_dir: Path) -> str:
    """Token of a run directory, made by process 0 and the same for all."""
    token = np.zeros(16, np.uint8)
    if jax.process_index() == 0:
        path = run_dir / TOKEN
        if not path.exists():
            write_whole(path, secrets.token_hex(16))
        token = np.frombuffer(bytes.fromhex(path.read_text().strip()), np.uint8)
    return bytes(from_first(token)).hex()
