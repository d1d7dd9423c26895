"""Bucket: the objects below a gs:// URL, through Google's client.

An object is there whole or not at all, and each version of it has a generation, by which a write
or a removal can ask that nobody else came between. Requests that fail, stall or are turned away
for a while are sent again with growing pauses, up to `PATIENCE_S`.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from lmwright.errors import StorageError, UserError, first_line, install

SCHEME = "gs://"
PATIENCE_S = 300.0
REQUEST_S = 30.0  # then it is sent again


class Changed(Exception):
    """The object is not of the generation that was asked for."""


@dataclass(frozen=True)
class Entry:
    """Facts of an object, by the service."""

    size: int
    """Size in bytes."""
    crc32c: str
    """Checksum in base64, as the service keeps it."""
    generation: int
    updated: datetime
    """Time of the last change, by the service's clock."""


def is_bucket(path: str | os.PathLike) -> bool:
    """True for the URL of a bucket or of something in it."""
    return os.fspath(path).startswith(SCHEME)


def is_file_name(name: str) -> bool:
    """True for a name that a file below a folder can have: "/etc/x" and "a/../../x" are none."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


class Bucket:
    """The objects below a URL; their names are relative to it. Every method raises UserError where
    the service refuses, and StorageError where it does not answer in time."""

    def __init__(self, url: str):
        name, _, prefix = url.removeprefix(SCHEME).partition("/")
        self.url, self._prefix = url.rstrip("/"), prefix.rstrip("/")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*[a-z0-9]", name):
            raise UserError(f"{url}: names no bucket; write gs://BUCKET/FOLDER")
        self._bucket = _client().bucket(name)

    def entries(self, below: str = "", *, apart: tuple[str, ...] = ()) -> dict[str, Entry]:
        """All objects by name, those in the folder `below` if given, without the folders `apart`
        of the first level. Objects whose names are none of a file below the URL are passed over:
        what stands for an empty folder, and what would be copied elsewhere on a disk."""
        start = "/".join(filter(None, (self._prefix, below))) + "/"
        start = start.lstrip("/")
        with self._told("listed"):
            if not apart:
                entries = dict(self._listed(start))
            else:
                pages = self._bucket.list_blobs(prefix=start, delimiter="/", **_patient())
                entries = {self._name(blob): _entry(blob) for blob in pages}
                for folder in sorted(pages.prefixes):
                    if folder.removeprefix(start).rstrip("/") not in apart:
                        entries |= self._listed(folder)
            return {name: entry for name, entry in entries.items() if is_file_name(name)}

    def _listed(self, start: str) -> Iterator[tuple[str, Entry]]:
        for blob in self._bucket.list_blobs(prefix=start, **_patient()):
            yield self._name(blob), _entry(blob)

    def entry(self, name: str) -> Entry | None:
        """Facts of an object; None where there is none."""
        with self._told(f"read ({name})"):
            blob = self._bucket.get_blob(self._key(name), **_patient())
            return None if blob is None else _entry(blob)

    def read(self, name: str) -> tuple[bytes, Entry] | None:
        """(content, facts) of an object at one moment; None where there is none."""
        from google.api_core.exceptions import NotFound

        with self._told(f"read ({name})"):
            for _ in range(10):
                blob = self._bucket.get_blob(self._key(name), **_patient())
                if blob is None:
                    return None
                try:
                    same = partial(blob.download_as_bytes, if_generation_match=blob.generation)
                    return same(**_patient()), _entry(blob)
                except NotFound:
                    continue  # it was replaced or removed between the two
                except Exception as error:
                    if not _is_changed(error):
                        raise
            raise UserError(f"{self.url}/{name}: changes faster than it can be read; try again")

    def write(self, name: str, data: bytes | str, generation: int | None = None) -> Entry:
        """Writes an object whole. Raises Changed unless it has this generation before (0: there is
        none)."""
        data = data.encode() if isinstance(data, str) else data
        blob = self._bucket.blob(self._key(name))
        with self._told(f"written ({name})"):
            try:
                blob.upload_from_string(
                    data, if_generation_match=generation, checksum="crc32c", **_patient()
                )
            except Exception as error:
                if not _is_changed(error):
                    raise
                # A request that was sent again finds what it wrote itself the first time.
                there = self.read(name)
                if there is None or there[0] != data:
                    raise Changed(name) from None
                return there[1]
            return _entry(blob)

    def upload(self, file: Path, name: str) -> Entry:
        """Copies a file of any size, which nobody writes to, into an object."""
        blob = self._bucket.blob(self._key(name))
        with self._told(f"written ({name})"):
            blob.upload_from_filename(str(file), checksum="crc32c", **_patient())
            return _entry(blob)

    def download(self, name: str, file: Path) -> None:
        """Copies an object into a file, which is there whole or not at all."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with self._told(f"read ({name})"):
                blob = self._bucket.blob(self._key(name))
                blob.download_to_filename(str(temporary), checksum="crc32c", **_patient())
            os.replace(temporary, file)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise UserError(
                f"{self.url}/{name}: lies where its bucket has a folder, too, or below a file; a "
                "disk cannot hold both, so rename one"
            ) from None
        finally:
            with suppress(OSError):
                temporary.unlink()

    def remove(self, name: str, generation: int | None = None) -> None:
        """Removes an object if it is there, and has this generation if one is given; raises Changed
        where it has another."""
        from google.api_core.exceptions import NotFound

        blob = self._bucket.blob(self._key(name))
        with self._told(f"removed ({name})"):
            try:
                blob.delete(if_generation_match=generation, **_patient())
            except NotFound:
                return
            except Exception as error:
                if not _is_changed(error):
                    raise
                raise Changed(name) from None

    def move(self, name: str, to: str) -> None:
        """Gives an object another name; nothing is sent to or from here."""
        blob = self._bucket.blob(self._key(name))
        with self._told(f"moved ({name})"):
            self._bucket.copy_blob(blob, self._bucket, self._key(to), **_patient())
        self.remove(name)

    def missing_permissions(self, wanted: Sequence[str]) -> list[str]:
        """The `wanted` permissions that this account lacks on the bucket."""
        with self._told("asked for permissions"):
            granted = self._bucket.test_iam_permissions(list(wanted), **_patient())
            return [name for name in wanted if name not in granted]

    def region(self) -> str:
        """Region of the bucket, as in US-CENTRAL1; empty where the service does not say."""
        with self._told("looked up"):
            self._bucket.reload(**_patient())
            return self._bucket.location or ""

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def _name(self, blob: Any) -> str:
        return blob.name[len(self._prefix) + bool(self._prefix) :]

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turns the client's exceptions into sentences."""
        try:
            yield
        except (UserError, Changed):
            raise
        except Exception as error:
            kind = StorageError if _may_pass(error) else UserError
            raise kind(f"{self.url}: cannot be {doing}: {_reason(error)}") from error


def _entry(blob: Any) -> Entry:
    return Entry(int(blob.size or 0), blob.crc32c or "", int(blob.generation), blob.updated)


def _patient() -> dict[str, Any]:
    """Arguments of every request: all are safe to send again, since writes are whole."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(PATIENCE_S), "timeout": REQUEST_S}


def _is_changed(error: Exception) -> bool:
    return getattr(error, "code", None) == 412


def token_may_come(error: Exception) -> bool:
    """True for an error of google-auth that passes: a token comes from a service, too, and that of
    a host's own account wraps what went wrong on the way."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    away = isinstance(error, TransportError) or isinstance(error.__cause__, TransportError)
    return away or (isinstance(error, GoogleAuthError) and error.retryable)


def _may_pass(error: Exception) -> bool:
    """False for what the service refuses: another try would end in the same way."""
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError

    if isinstance(error, GoogleAuthError):
        return token_may_come(error)
    code = int(getattr(error, "code", 0) or 0)
    return not isinstance(error, DefaultCredentialsError) and code_may_pass(code)


def code_may_pass(code: int) -> bool:
    """True for a code of HTTP that is no refusal."""
    return not 400 <= code < 500 or code in (408, 429)


def _reason(error: Exception) -> str:
    """Reason of a refusal, with the cure."""
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError

    code = int(getattr(error, "code", 0) or 0)
    if isinstance(error, (DefaultCredentialsError, GoogleAuthError)) or code == 401:
        return (
            "there are no valid credentials here; run `gcloud auth application-default login`, or "
            "set GOOGLE_APPLICATION_CREDENTIALS"
        )
    if code == 403:
        return (
            f"this account may not ({first_line(error):.200}); grant it "
            "roles/storage.objectAdmin and roles/storage.legacyBucketReader on the bucket, and on "
            "a TPU slice the scope cloud-platform"
        )
    if code == 404:
        return (
            "there is no such bucket; correct its name, or make it with "
            "`gcloud storage buckets create`"
        )
    return f"{first_line(error):.200}; try again, or check the network and the service's status"


@cache
def _client() -> Any:
    """The client, which authenticates itself as Google's tools do."""
    try:
        from google.cloud import storage
    except ImportError:
        raise UserError(f"buckets (gs://) need Google's client: {install('gcs')}") from None
    from google.auth.exceptions import DefaultCredentialsError

    project = os.environ.get("GOOGLE_CLOUD_PROJECT", "none")  # objects need none
    try:
        return storage.Client(project=project)
    except DefaultCredentialsError as error:
        raise UserError(f"gs://: {_reason(error)}") from None
