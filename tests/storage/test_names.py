"""Names of objects in other people's buckets write nothing outside the folders of this machine."""

import re
import tempfile

import pytest

from lmwright.data.carry import working_folder
from lmwright.data.rows.shards import RemotePlace
from lmwright.errors import UserError
from lmwright.evals.predict import Predictor
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import load_run, open_place
from lmwright.report.read import read_run
from lmwright.storage.bucket import Bucket
from lmwright.storage.mirror import fetched, mirror_folder


def open_model(name):
    return open_place(name).model


@pytest.fixture
def put(url):
    """Writes an object of any name below the URL."""

    def write(name):
        bucket = Bucket(url)
        bucket._bucket.blob(f"{bucket._prefix}/{name}").upload_from_string("theirs")

    return write


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


# The last two stand for folders that the Cloud Console has made.
@pytest.mark.parametrize("name", ["{}/x", "../../x", "a/../../x", "./x", "a//x", "", "sub/"])
def test_objects_that_are_no_files_below_are_passed_over(url, put, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    for each in ("run.toml", name.format(victim), "sub/file"):
        put(each)
    assert set(Bucket(url).entries()) == {"run.toml", "sub/file"}
    before = files(tmp_path)
    here = fetched(url)
    with working_folder(url) as folder:
        assert folder == str(here)
    own = {p for p in files(here) if not p.startswith(".")}
    assert own == {"run.toml", "sub/file"} and not files(victim)
    assert {p for p in files(tmp_path) - before if "cache" not in p} == set()


@pytest.mark.parametrize("name", ["nothing", "nothing/checkpoints/3", "nothing.gguf"])
@pytest.mark.parametrize("read", [open_model, read_run, load_run])
def test_what_is_not_there_goes_by_its_url(url, name, read):
    """Not by the copy on this machine, which a cache has made."""
    with pytest.raises(UserError, match=f"^{re.escape(url)}/{name}(/run.toml)?: .+") as caught:
        read(f"{url}/{name}")
    assert str(mirror_folder(url)) not in str(caught.value)


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../../../x"])
def test_a_fetched_folder_holds_no_files_that_lie_elsewhere(url, put, tmp_path, monkeypatch, name):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a" / "b"))
    for each in ("tokenizer/", "tokenizer/tokenizer.json", "tokenizer/sub/x"):
        put(each)
    folder = RemotePlace(url).fetch("tokenizer")
    assert files(tmp_path / "a" / "b" / folder) == {"tokenizer.json", "sub/x"}
    before = files(tmp_path)
    put(f"tokenizer/{name}")
    with pytest.raises(UserError, match="which is not in it"):
        RemotePlace(url).fetch("tokenizer")
    assert {p for p in files(tmp_path) - before if "/sub/" not in p and ".json" not in p} == set()
    with pytest.raises(UserError, match="is missing"):
        RemotePlace(url).fetch("tokenizers")


def test_a_name_that_is_a_file_and_a_folder_is_one_sentence(url, put):
    for name in ("a", "a/b"):
        put(name)
    with pytest.raises(UserError, match="a disk cannot hold both"):
        fetched(url)


def test_a_refused_model_is_named_by_its_url():
    """The copy of its files on this machine says nothing to its user."""
    loaded = LoadedModel(
        model=None, tensors={}, tokenizer_dir=None, facts=None, path=mirror_folder("gs://bkt/run")
    )
    with pytest.raises(UserError, match=r"^gs://bkt/run: is not a classifier"):
        Predictor(loaded, None, None)
