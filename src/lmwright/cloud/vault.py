"""Vault: secrets of the hosts, which lie in Google's Secret Manager and nowhere else.

    launch --secret HF_TOKEN=my-token    the job holds the two names
    host --its service account--> Secret Manager --> $HF_TOKEN of the ranks, in memory only

gcloud's own variable leads to another endpoint:

    CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER=http://127.0.0.1:8080/
"""

import base64
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from lmwright.cloud import metadata
from lmwright.cloud.service import Away
from lmwright.errors import UserError
from lmwright.guard.redact import redact
from lmwright.guard.urls import has_secrets

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
SERVICE = "https://secretmanager.googleapis.com/"
PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z][A-Za-z0-9_-]{0,254})")
TOKEN = re.compile(r"\b(hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA\w{16}|sk-[\w-]{16,})")
SHORTEST = 8  # characters of a value that can be told from a word
TIMEOUT_S = 20.0
PATIENCE_S, PAUSE_S = 300.0, 5.0


def refuse_plain_secrets(words: Sequence[str]) -> None:
    """Raises UserError for a command that holds a password or token: a job keeps its command."""
    secret = {name for name in os.environ if name not in redact({name: ""})}
    values = {os.environ[name]: name for name in secret if len(os.environ[name]) >= SHORTEST}
    for place, word in enumerate(words, 1):
        name = next((name for value, name in values.items() if value in word), "")
        if name or has_secrets(word) or TOKEN.search(word):
            what = f"the value of ${name}" if name else "a password or token"
            raise UserError(
                f"--: word {place} of the command holds {what}, and the command is kept with the "
                "job; let the program read it from the environment, on slices by --secret"
            )


def parse_pairs(pairs: Sequence[str]) -> None:
    """Raises UserError for a pair that does not name a secret."""
    for pair in pairs:
        match = PAIR.fullmatch(pair)
        if match is None or TOKEN.search(pair):
            name = pair.partition("=")[0]
            raise UserError(
                f"--secret: {name}=...: write VARIABLE=NAME, where NAME is that of a secret in "
                "Secret Manager, and not the secret itself"
            )


def read_secrets(project: str, pairs: Sequence[str]) -> dict[str, str]:
    """Variables with their secrets, by this host's service account. Raises UserError."""
    return {name: _read(project, secret) for name, _, secret in (p.partition("=") for p in pairs)}


def _read(project: str, secret: str) -> str:
    """A secret. A service that does not answer is waited for a while."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _ask(project, secret)
        except Away as error:
            if time.monotonic() > end:
                raise UserError(f"{error}") from None
        time.sleep(PAUSE_S)


def _ask(project: str, secret: str) -> str:
    """A secret, asked for once. Raises Away where that may pass."""
    answer = metadata.read("instance/service-accounts/default/token")
    token = json.loads(answer or "{}").get("access_token", "")
    root = os.environ.get(ENDPOINT, SERVICE)
    url = f"{root}v1/projects/{project}/secrets/{secret}/versions/latest:access"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as there:
            return base64.b64decode(json.load(there)["payload"]["data"]).decode()
    except urllib.error.HTTPError as error:
        cure = {
            403: "give the hosts' account roles/secretmanager.secretAccessor",
            404: f"make it: gcloud secrets create {secret} --data-file=-",
        }.get(error.code, "try again")
        kind = Away if error.code == 429 or error.code >= 500 else UserError
        raise kind(f"--secret: {secret} of project {project}: {error.reason}; {cure}") from None
    except (OSError, ValueError, KeyError) as error:
        raise Away(
            f"--secret: {secret} of project {project} cannot be read ({type(error).__name__}); "
            "look whether the Secret Manager API is enabled"
        ) from None
