"""A cluster, and a job on it."""

from tests.cloud.gke.jobs import gke, spec  # noqa: F401
