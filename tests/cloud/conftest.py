"""The storage server of tests/storage, for jobs whose state is in a bucket."""

from tests.storage.conftest import proxy, server, small_run, url  # noqa: F401
