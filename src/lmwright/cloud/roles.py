"""Roles: may the account of the hosts save in the bucket, and delete its own slice?

A slice whose job is over deletes itself if no supervisor does. That needs a role in the project,
and saving needs two on the bucket; nobody notices that one is missing until it costs. So `launch`
looks beforehand. gcloud's own variable leads to another endpoint:

    CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER=http://127.0.0.1:8080/
"""

import os
from typing import Any

from lmwright.cloud.spec import Cloud
from lmwright.cloud.tpu_api import credentials_for
from lmwright.errors import UserError
from lmwright.storage.bucket import SCHEME

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"
SERVICE = "https://cloudresourcemanager.googleapis.com/"
STORAGE_ENDPOINT = "STORAGE_EMULATOR_HOST"
STORAGE = "https://storage.googleapis.com"
DELETES_SLICES = {"roles/tpu.admin", "roles/editor", "roles/owner"}
READS_BUCKET = {"roles/storage.legacyBucketReader", "roles/storage.legacyBucketWriter"}
WRITES_OBJECTS = {"roles/storage.objectAdmin", "roles/storage.objectUser"}
DOES_BOTH = {"roles/storage.admin", "roles/storage.legacyBucketOwner"}
TIMEOUT_S = 20.0


def warn_of_roles(cloud: Cloud, url: str = "") -> list[str]:
    """Notes if the account of the hosts cannot delete its slice or, with the URL of a job, not save
    in its bucket; or if that is not known."""
    try:
        account = cloud.service_account or _default_account(cloud)
        of_project = _roles(_call(cloud, "POST", f"{cloud.project}:getIamPolicy"), account)
    except (OSError, ValueError, KeyError) as error:
        return [
            "it is not known whether the hosts may delete their slice when no supervisor is there "
            f"({type(error).__name__}); they need the role roles/tpu.admin"
        ]
    notes = []
    if not DELETES_SLICES & of_project:
        notes.append(
            f"{account} may not delete slices: one whose job ends while no supervisor is there "
            f"stays, and costs. Allow it: gcloud projects add-iam-policy-binding {cloud.project} "
            f"--member=serviceAccount:{account} --role=roles/tpu.admin"
        )
    return notes + (_of_bucket(cloud, account, of_project, url) if url else [])


def _of_bucket(cloud: Cloud, account: str, of_project: set[str], url: str) -> list[str]:
    """Notes about the roles on the job's bucket."""
    name = url.removeprefix(SCHEME).partition("/")[0]
    root = os.environ.get(STORAGE_ENDPOINT) or STORAGE
    try:
        roles = _roles(_ask(cloud, "GET", f"{root}/storage/v1/b/{name}/iam"), account) | of_project
    except (OSError, ValueError, KeyError) as error:
        return [
            f"it is not known whether {account} may save in {SCHEME}{name} "
            f"({type(error).__name__}); it needs roles/storage.objectAdmin and "
            "roles/storage.legacyBucketReader there"
        ]
    if roles & DOES_BOTH:
        return []
    missing = [] if roles & WRITES_OBJECTS else ["roles/storage.objectAdmin"]
    missing += [] if roles & READS_BUCKET else ["roles/storage.legacyBucketReader"]
    command = f"gcloud storage buckets add-iam-policy-binding {SCHEME}{name}"
    return [
        f"{account} is not seen to have {role} on the bucket, without which it cannot save. Give "
        f"it: {command} --member=serviceAccount:{account} --role={role}"
        for role in missing
    ]


def _roles(policy: dict[str, Any], account: str) -> set[str]:
    member = f"serviceAccount:{account}"
    bindings = policy.get("bindings", [])
    return {entry["role"] for entry in bindings if member in entry.get("members", ())}


def _default_account(cloud: Cloud) -> str:
    number = _call(cloud, "GET", cloud.project)["projectNumber"]
    return f"{number}-compute@developer.gserviceaccount.com"


def _call(cloud: Cloud, method: str, path: str) -> dict[str, Any]:
    return _ask(cloud, method, f"{os.environ.get(ENDPOINT, SERVICE)}v1/projects/{path}")


def _ask(cloud: Cloud, method: str, url: str) -> dict[str, Any]:
    """Answer of a service. Raises OSError where it refuses or is not reached."""
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import AuthorizedSession

    try:
        session = AuthorizedSession(credentials_for(cloud.project))
        answer = session.request(method, url, timeout=TIMEOUT_S)
    except (GoogleAuthError, UserError) as error:
        raise OSError(str(error)) from None
    answer.raise_for_status()  # an OSError
    return answer.json()
