"""A cluster, and a job on it."""

from tests.cloud.gke.jobs import gke, run, spec  # noqa: F401
