"""Context: which cluster of the user's kubeconfig is meant, and the client that reaches it."""

import os
from typing import Any

from lmwright.errors import UserError, first_line, install

GET_CREDENTIALS = "gcloud container clusters get-credentials CLUSTER --location LOCATION"


def find_context(cluster: str) -> str:
    """The context of a cluster: of that name, or gke_PROJECT_LOCATION_CLUSTER as gcloud calls it.
    Raises UserError where there is none, or several."""
    if not cluster:
        raise UserError("--on: gke: names no cluster; write gke:CLUSTER")
    names = _contexts()
    if cluster in names:
        return cluster
    ours = [name for name in names if name.startswith("gke_") and name.endswith(f"_{cluster}")]
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise UserError(f"--on: gke:{cluster} is one of {', '.join(ours)}; write the whole context")
    known = ", ".join(names) or "none"
    raise UserError(
        f"--on: gke:{cluster}: the kubeconfig has no such cluster, but these contexts: {known}; "
        f"run: {GET_CREDENTIALS}"
    )


def connect(context: str) -> Any:
    """The client of a context. Raises UserError where it is not installed, or its kubeconfig is
    broken."""
    config = _config()
    try:
        return config.new_client_from_config(
            config_file=_file(), context=find_context(context), persist_config=False
        )
    except (config.ConfigException, OSError, ValueError) as error:
        raise _unreadable(error) from None


def location_of(context: str) -> str:
    """Zone or region of a cluster, as gcloud writes it into the context; empty if it has not."""
    parts = context.split("_")
    return parts[2] if parts[0] == "gke" and len(parts) > 3 else ""


def _contexts() -> list[str]:
    config = _config()
    from yaml import YAMLError

    try:
        contexts, _ = config.list_kube_config_contexts(_file())
    except (config.ConfigException, YAMLError, OSError, ValueError, TypeError) as error:
        raise _unreadable(error) from None
    return sorted(context["name"] for context in contexts)


def _file() -> str | None:
    """The kubeconfig's path. The client reads the variable once, when it is imported."""
    return os.environ.get("KUBECONFIG") or None


def _config() -> Any:
    try:
        from kubernetes import config
    except ImportError:
        raise UserError(f"--on: gke: needs the package kubernetes; {install('gke')}") from None
    return config


def _unreadable(error: Exception) -> UserError:
    return UserError(
        f"--on: gke: the kubeconfig cannot be used ({first_line(error):.200}); run: "
        f"{GET_CREDENTIALS}"
    )
