"""What the tests of damaged stores start from."""

import pytest

from tests.data.user_run import write_run


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A folder with a run whose data is prepared."""
    from lmwright.cli.main import main

    folder = tmp_path_factory.mktemp("clean")
    write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["prepare", "run.toml"]) == 0
    return folder
