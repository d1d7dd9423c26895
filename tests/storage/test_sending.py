"""An output that is sent to a bucket: what lies there is a whole model, or is taken for none."""

import pytest

from lmwright.errors import StorageError, UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.mirror import sending

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def export(out, text="new", overwrite=False):
    with sending(out, overwrite=overwrite) as local:
        local.mkdir()
        for name in FILES:
            (local / name).write_text(text)


def contents(out):
    bucket = Bucket(out)
    return {name: bucket.read(name)[0].decode() for name in bucket.entries()}


@pytest.fixture
def stop_after(monkeypatch):
    """Lets uploads fail with an error after so many."""
    upload = Bucket.upload

    def arrange(count, error):
        left = [count]

        def limited(self, file, name):
            left[0] -= 1
            if left[0] < 0:
                raise error
            return upload(self, file, name)

        monkeypatch.setattr(Bucket, "upload", limited)

    yield arrange


@pytest.mark.parametrize(
    "error, left", [(UserError("no"), 0), (KeyboardInterrupt(), 0), (StorageError("no answer"), 2)]
)
def test_what_was_interrupted_goes_on(url, stop_after, error, left):
    stop_after(2, error)
    with pytest.raises(type(error)):
        export(url)
    assert len(contents(url)) == left and "config.json" not in contents(url)
    stop_after(9, error)
    export(url)
    assert contents(url) == dict.fromkeys(FILES, "new")


@pytest.mark.parametrize("count", range(3))
def test_half_of_two_models_is_never_taken_for_one(url, stop_after, count):
    export(url, "old")
    with pytest.raises(UserError, match="is there already"):
        export(url)
    stop_after(count, StorageError("no answer"))
    with pytest.raises(StorageError):
        export(url, overwrite=True)
    assert "config.json" not in contents(url)
    stop_after(9, None)
    export(url)
    assert contents(url) == dict.fromkeys(FILES, "new")


def test_other_files_are_left_alone(url):
    Bucket(url).write("mine.txt", "mine")
    with pytest.raises(UserError, match="is there already"):
        export(url)
    assert contents(url) == {"mine.txt": "mine"}


def test_a_file_takes_its_proof_along(url):
    with sending(f"{url}/m.gguf") as local:
        local.write_text("weights")
        local.with_name("m.gguf.convert.json").write_text("proof")
    assert contents(url) == {"m.gguf": "weights", "m.gguf.convert.json": "proof"}
    for overwrite, cure in ((False, "add --overwrite"), (None, "remove it")):  # adapters' have none
        with pytest.raises(UserError, match=f"is there already; choose another place, or {cure}"):
            with sending(f"{url}/m.gguf", overwrite=overwrite):
                pass


@pytest.mark.parametrize("out", ["s3://bucket/model", "gs:/bucket/model"])  # the second is a Path
def test_other_urls_are_refused(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{out}: cannot be written to; give .* or gs://BUCKET"):
        export(out)
    assert not list(tmp_path.iterdir())
