"""Push: copies a prepared store into a bucket and proves that it arrived.

    <stage>/files ... --> gs://bucket/data/<stage>/files ...   then <stage>/manifest.json

A stage is there when its manifest is. Files that are there already, with equal checksums, are not
sent again, so a push that was interrupted goes on where it was.
"""

import base64
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from lmwright.data.manifest import MANIFEST, STAGES, altered_error, file_pieces, read_manifest
from lmwright.data.portions import PORTIONS, folder_of, parse_portions
from lmwright.data.stored import read_small
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket, Entry, is_bucket

THREADS = 8
STATE = "stage.json"


@dataclass(frozen=True)
class Pushed:
    """A stage that is in the bucket."""

    stage: str
    files: int
    size_bytes: int
    sent: int
    """Files that were not there before."""


def push_store(source: str | os.PathLike, url: str) -> list[Pushed]:
    """Copies every finished stage of a local `data.dir`. Raises UserError for a file that is not
    as its manifest records, before it is sent, and where the bucket refuses."""
    folder = Path(source)
    if not is_bucket(url):
        raise UserError(f"{url}: is not a bucket; write gs://BUCKET/FOLDER, or disk:NAME")
    if is_bucket(source):
        raise UserError(f"{source}: is in a bucket already; give a folder of this machine")
    portions = read_small(folder, PORTIONS)
    if portions is not None:
        return _push_portions(folder, url, portions)
    stages = [stage for stage in STAGES if (folder / stage / MANIFEST).exists()]
    if not stages:
        raise UserError(f"{folder} holds no finished stage; run `lmwright prepare` to make them")
    bucket = Bucket(url)
    there = bucket.entries()
    return [_push_stage(folder, stage, bucket, there) for stage in stages]


def _push_portions(folder: Path, url: str, raw: bytes) -> list[Pushed]:
    """Copies the finished portions, and then the list of them."""
    names = map(folder_of, range(len(parse_portions(raw, str(folder)).finished)))
    pushed = [
        replace(one, stage=f"{name}/{one.stage}")
        for name in names
        for one in push_store(folder / name, f"{url.rstrip('/')}/{name}")
    ]
    Bucket(url).write(PORTIONS, raw)
    return pushed


def _push_stage(folder: Path, stage: str, bucket: Bucket, entries: dict[str, Entry]) -> Pushed:
    manifest = read_manifest(folder / stage)

    def push(name: str) -> bool:
        key = f"{stage}/{name}"
        entry = manifest.files[name]
        crc = _checked_crc(folder / key, entry["xxh3_128"])
        same = entries.get(key)
        if same is not None and (same.size, same.crc32c) == (entry["bytes"], crc):
            return False
        arrived = bucket.upload(folder / key, key)
        if (arrived.size, arrived.crc32c) != (entry["bytes"], crc):
            raise UserError(f"{bucket.url}/{key}: is not what was sent; push again")
        return True

    whole = (folder / stage / MANIFEST).read_bytes()
    marker = f"{stage}/{MANIFEST}"
    before = bucket.read(marker) if marker in entries else None
    if before is not None and before[0] != whole:
        bucket.remove(marker)  # it describes other files, as do the markers of its parts
        for key in filter(lambda key: key.startswith(f"{stage}/parts/"), entries):
            bucket.remove(key)
    with ThreadPoolExecutor(THREADS) as pool:
        sent = sum(pool.map(push, sorted(manifest.files)))
    if (folder / stage / STATE).exists():
        bucket.upload(folder / stage / STATE, f"{stage}/{STATE}")
    bucket.write(marker, whole)
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return Pushed(stage, len(manifest.files), size, sent)


def _checked_crc(path: Path, wanted: str) -> str:
    """CRC32C of a file, base64, as the service has it. Raises UserError unless the file has the
    hash that its manifest records."""
    import google_crc32c  # comes with the bucket's client

    if path.exists() and not path.is_file():  # a pipe is waited for
        raise altered_error(str(path), "it is no file")
    crc, digest = google_crc32c.Checksum(), xxhash.xxh3_128()
    try:
        for piece in file_pieces(path):
            crc.update(piece)
            digest.update(piece)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; run `lmwright prepare` again") from None
    if digest.hexdigest() != wanted:
        raise altered_error(str(path), "its hash is not the manifest's")
    return base64.b64encode(crc.digest()).decode()


def push_command(source: str, url: str) -> None:
    """Prints one line per stage (`lmwright data push`)."""
    for p in push_store(source, url):
        print(f"{p.stage:<10} {p.files:>6} files {p.size_bytes:>16,} bytes  {p.sent} sent")
    print(f"in {url}; use it with data.dir={url}")
