"""Compute Engine: disks and small VMs of a project, by its REST API with Google's credentials.

google-auth, which the clients of buckets and slices need too, is all that it takes. Every change is
an operation that is waited for. gcloud's own variables lead to another endpoint:

    CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE=http://127.0.0.1:8080/compute/v1/
    CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true
"""

import os
import time
import uuid
from typing import Any

from lmwright.cloud.tpu_api import credentials_for
from lmwright.errors import UserError, install
from lmwright.storage.bucket import token_may_come

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
SERVICE = "https://compute.googleapis.com/compute/v1/"
TIMEOUT_S = 150.0  # waiting for an operation takes up to two minutes
TRIES = 5
PAUSE_S = 1.0
WAIT_S = 1800.0
NOT_FOUND = 404


class Refused(UserError):
    """The service refuses a request, or an operation failed."""


class Compute:
    """Disks and instances of a project. Every method raises UserError where the service refuses or
    is not reached."""

    def __init__(self, project: str):
        self.project = project
        self._session = _session(project)

    def get(self, zone: str, kind: str, name: str) -> dict[str, Any] | None:
        """A resource; None where there is none."""
        return self._call("GET", self.path(zone, kind, name))

    def named(self, zone: str, kind: str, label: str) -> list[dict[str, Any]]:
        """The resources of a zone that have a label."""
        path, page, found = self.path(zone, kind), "", []
        while True:
            words = {"filter": f"labels.{label}:*"} | ({"pageToken": page} if page else {})
            answer = self._call("GET", path, query=words) or {}
            found += answer.get("items", [])
            page = answer.get("nextPageToken", "")
            if not page:
                return [item for item in found if label in item.get("labels", {})]

    def make(self, zone: str, kind: str, body: dict[str, Any]) -> None:
        """Makes a resource, and waits for it."""
        self._change("POST", zone, self.path(zone, kind), f"{kind[:-1]} {body['name']}", body)

    def change(self, zone: str, kind: str, name: str, verb: str, body: dict[str, Any]) -> None:
        """Changes a resource; without a verb, some of its fields."""
        method, path = ("POST", f"{name}/{verb}") if verb else ("PATCH", name)
        query = {} if verb else {"paths": ",".join(set(body) - {"name"})}
        self._change(method, zone, self.path(zone, kind, path), f"{kind[:-1]} {name}", body, query)

    def delete(self, zone: str, kind: str, name: str) -> None:
        """Deletes a resource, if it is there, and waits until it is gone."""
        self._change("DELETE", zone, self.path(zone, kind, name), f"{kind[:-1]} {name}", gone=True)

    def console(self, zone: str, name: str) -> str:
        """Output of a VM since it started; empty where that is not known."""
        try:
            answer = self._call("GET", self.path(zone, "instances", f"{name}/serialPort"))
        except UserError:
            return ""
        return (answer or {}).get("contents", "")

    def check_zone(self, zone: str) -> None:
        """Raises UserError where the project has no such zone."""
        if self._call("GET", f"projects/{self.project}/zones/{zone}") is None:
            raise UserError(
                f"--zone: project {self.project} has no zone {zone}; see: gcloud compute zones list"
            )

    def path(self, zone: str, kind: str, name: str = "") -> str:
        """Path of a resource, or of all."""
        return f"projects/{self.project}/zones/{zone}/{kind}" + (f"/{name}" if name else "")

    def _change(
        self, method: str, zone: str, path: str, thing: str,
        body: dict[str, Any] | None = None, query: dict[str, str] | None = None, gone: bool = False,
    ) -> None:  # fmt: skip
        same = (query or {}) | {"requestId": str(uuid.uuid4())}  # a request sent twice counts once
        operation = self._call(method, path, body, same)
        if operation is None:
            if gone:
                return
            raise Refused(f"{thing}: project {self.project} has no zone {zone}; check --zone")
        end = time.monotonic() + WAIT_S
        while operation.get("status") != "DONE":
            if time.monotonic() > end:
                raise UserError(f"{thing}: is not ready after {WAIT_S:g} s; look at it in {zone}")
            waited = self._call("POST", self.path(zone, "operations", f"{operation['name']}/wait"))
            operation = waited or {"status": "DONE"}
        if errors := operation.get("error", {}).get("errors"):
            if gone and errors[0].get("code") == "RESOURCE_NOT_FOUND":
                return
            raise Refused(f"{thing} in {zone}: {errors[0].get('message') or errors[0].get('code')}")

    def _call(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The service's answer; None where there is nothing of that name."""
        from google.auth.exceptions import GoogleAuthError, TransportError
        from requests import RequestException

        url, reason = os.environ.get(ENDPOINT, SERVICE).rstrip("/") + "/" + path, ""
        for number in range(TRIES):
            time.sleep(PAUSE_S * (2**number - 1))
            try:
                answer = self._session.request(
                    method, url, json=body, params=query, timeout=TIMEOUT_S
                )
            except (RequestException, TransportError) as error:
                reason = type(error).__name__
                continue
            except GoogleAuthError as error:
                if token_may_come(error):
                    reason = "there is no token now"
                    continue
                raise UserError(
                    "Compute Engine: no valid credentials; run: gcloud auth application-default "
                    "login"
                ) from None
            if answer.status_code == NOT_FOUND:
                return None
            if answer.status_code < 400:
                return answer.json()
            reason = _reason(answer)
            if answer.status_code < 500 and answer.status_code != 429:
                raise self._refused(answer.status_code, path, reason)
        raise UserError(f"Compute Engine does not answer ({reason}); try again")

    def _refused(self, code: int, path: str, reason: str) -> Refused:
        name = path.removeprefix(f"projects/{self.project}/zones/")
        if code in (401, 403):
            return Refused(
                f"{name}: project {self.project} refuses it ({reason}); the account needs "
                "roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser there, and the "
                "API compute.googleapis.com has to be enabled"
            )
        return Refused(f"{name}: the service refuses it: {reason}")


def _reason(answer: Any) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _session(project: str) -> Any:
    """Session with the credentials of this machine."""
    try:
        from google.auth.transport.requests import AuthorizedSession
    except ImportError:
        raise UserError(f"disks and VMs need the package google-auth; {install('cloud')}") from None
    return AuthorizedSession(credentials_for(project))
