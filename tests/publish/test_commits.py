"""Commits to a hub by its own client, of small files in place of exported models."""

import pytest

from lmwright.errors import UserError
from lmwright.publish.account import OURS, newest_commit, open_repo, upload
from lmwright.publish.stage import STALE
from tests.fake_hub import Commit

REPO = "me/tiny"


@pytest.fixture
def api(hub):
    return open_repo(REPO, public=False)


def sent(api, folder, files, *, branch="main", parent=None, overwrite=False):
    """Commits files as `publish` does, after a look at what is there, or after `parent`."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    parent = parent or newest_commit(api, REPO, branch, overwrite=overwrite)
    upload(api, folder, REPO, branch=branch, parent=parent, title="step 2 of tiny", stale=STALE)


def test_files_of_an_earlier_split_go_and_others_stay(hub, api, tmp_path):
    split = {"model-00001-of-00002.safetensors": "1", "model-00002-of-00002.safetensors": "2"}
    sent(api, tmp_path / "a", split | {"model.safetensors.index.json": "{}", "notes.txt": "mine"})
    assert split.keys() <= hub.files(REPO).keys()
    sent(api, tmp_path / "a", {"model.safetensors": "whole"})
    left = {name for name in hub.files(REPO) if not name.startswith(".")}
    assert left == {"model.safetensors", "notes.txt"}


def test_the_newest_commit_is_ours_or_stays(hub, api, tmp_path):
    """The hub's own first one is nobody's."""
    sent(api, tmp_path / "a", {"README.md": "ours"})
    commits = hub.repos[REPO].branches["main"]
    assert commits[-1].title == f"{OURS}step 2 of tiny"
    sent(api, tmp_path / "a", {"README.md": "ours again"})
    commits.append(Commit("Update README.md", {"README.md": b"# Mine"}))
    with pytest.raises(UserError, match=r"last changed by 'Update README.md' \(.* on main\)"):
        sent(api, tmp_path / "a", {"README.md": "ours once more"})
    assert hub.files(REPO)["README.md"] == b"# Mine"
    before = newest_commit(api, REPO, "main", overwrite=True)
    commits.append(Commit("Another", {"README.md": b"# Theirs"}))
    with pytest.raises(UserError, match="someone else changed it meanwhile"):
        sent(api, tmp_path / "a", {"README.md": "late"}, parent=before)
    assert hub.files(REPO)["README.md"] == b"# Theirs"
    sent(api, tmp_path / "a", {"README.md": "meant"}, overwrite=True)
    assert hub.files(REPO)["README.md"] == b"meant"


def test_a_new_branch_begins_as_the_repository_did(hub, api, tmp_path):
    """Not as main is now; a commit of somebody else there is not in its way."""
    sent(api, tmp_path / "a", {"model.safetensors": "another step"})
    hub.repos[REPO].branches["main"].append(Commit("by hand", hub.files(REPO)))
    assert newest_commit(api, REPO, "step-2", overwrite=False) is not None
    assert "model.safetensors" not in hub.files(REPO, "step-2")
    sent(api, tmp_path / "a", {"model.safetensors": "step 2"}, branch="step-2")
    assert hub.files(REPO, "step-2")["model.safetensors"] == b"step 2"
    assert hub.files(REPO)["model.safetensors"] == b"another step"
    hub.repos[REPO].branches["main"][0].title = "Add a license"  # of somebody, too
    assert newest_commit(api, REPO, "step-3", overwrite=False) is not None
