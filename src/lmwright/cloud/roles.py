"""Roles: may the account of the hosts delete its own slice?

A slice whose job is over deletes itself if no supervisor does. That needs a role in the project,
and nobody notices that it is missing until the bill comes; so `launch` looks beforehand. gcloud's
own variable leads to another endpoint:

    CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER=http://127.0.0.1:8080/
"""

import os
from typing import Any

from lmwright.cloud.spec import Cloud
from lmwright.cloud.tpu_api import NO_CREDENTIALS, SCOPE

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"
SERVICE = "https://cloudresourcemanager.googleapis.com/"
ENOUGH = {"roles/tpu.admin", "roles/editor", "roles/owner"}
TIMEOUT_S = 20.0


def warn_of_roles(cloud: Cloud) -> list[str]:
    """A note if the account of the hosts cannot delete its slice, or if that is not known."""
    try:
        account = cloud.service_account or _default_account(cloud.project)
        policy = _call("POST", f"{cloud.project}:getIamPolicy")
    except (OSError, ValueError, KeyError) as error:
        return [
            "it is not known whether the hosts may delete their slice when no supervisor is there "
            f"({type(error).__name__}); they need the role roles/tpu.admin"
        ]
    member = f"serviceAccount:{account}"
    bindings = policy.get("bindings", [])
    if ENOUGH & {entry["role"] for entry in bindings if member in entry.get("members", ())}:
        return []
    return [
        f"{account} may not delete slices: one whose job ends while no supervisor is there stays, "
        f"and costs. Allow it: gcloud projects add-iam-policy-binding {cloud.project} "
        f"--member={member} --role=roles/tpu.admin"
    ]


def _default_account(project: str) -> str:
    number = _call("GET", project)["projectNumber"]
    return f"{number}-compute@developer.gserviceaccount.com"


def _call(method: str, path: str) -> dict[str, Any]:
    """Answer of the service. Raises OSError where it refuses or is not reached."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import AuthorizedSession

    credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call]
    try:
        if os.environ.get(NO_CREDENTIALS, "").lower() not in ("1", "true"):
            credentials, _ = google.auth.default(scopes=[SCOPE])
        url = f"{os.environ.get(ENDPOINT, SERVICE)}v1/projects/{path}"
        answer = AuthorizedSession(credentials).request(method, url, timeout=TIMEOUT_S)
    except GoogleAuthError as error:
        raise OSError(str(error)) from None
    answer.raise_for_status()  # an OSError
    return answer.json()
