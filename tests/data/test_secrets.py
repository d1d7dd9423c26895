"""Credentials in the URL of a source reach no file and no output of prepare and train."""

import base64
import http.server
import stat
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from lmwright.cli.main import main
from lmwright.guard.urls import has_secrets, redact_text, was_redacted, without_secrets
from tests.data.user_run import RUN, command, write_run

SECRETS = ("hunter2secret", "sig0secret", "tok1secret", "tok2secret")
SIGNED = "words.jsonl?version=3&X-Amz-Signature=sig0secret&X-Amz-Date=20250101&token="


class Guarded(http.server.SimpleHTTPRequestHandler):
    """Serves files to those who give the password and a token."""

    def send_head(self):
        told = base64.b64decode(self.headers.get("Authorization", " ").split(" ")[1])
        token = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if told != b"me:hunter2secret" or token not in SECRETS:
            return self.send_error(403)
        return super().send_head()

    def log_message(self, *_):
        pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`me:password@127.0.0.1:port` of a server that has words.jsonl; we are in another folder."""
    (tmp_path / "far").mkdir()
    (tmp_path / "here").mkdir()
    write_run(tmp_path / "far")
    monkeypatch.chdir(tmp_path / "here")

    def handler(*args):
        return Guarded(*args, directory=str(tmp_path / "far"))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"me:hunter2secret@127.0.0.1:{server.server_port}"
    server.shutdown()


def use(host, token):
    Path("run.toml").write_text(RUN.replace("PATH", f"http://{host}/{SIGNED}{token}"))


def no_secret_in(text):
    assert not [s for s in SECRETS if s in text]


def test_no_file_and_no_output_holds_a_credential(host, capsys):
    use(host, "tok1secret")
    said = ""
    for words in (["config", "show"], ["prepare"], ["train"], ["data", "show"]):
        code, out = command(capsys, *words, "run.toml")
        assert code == 0, out
        said += out
    code, out = command(capsys, "report", "run")
    no_secret_in(said + out)
    assert "version=3&***" in said
    files = [p for p in Path().rglob("*") if p.is_file() and p.name != "run.toml"]
    files += [Path("run/run.toml")]
    assert len(files) > 30
    for path in files:
        raw = path.read_bytes()
        assert not [s for s in SECRETS if s.encode() in raw], path
    for path in ("run/run.toml", "data/normalize/stage.json", "data/normalize/manifest.json"):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600, path


def test_a_new_token_redoes_nothing_and_is_the_same_run(host, capsys):
    use(host, "tok1secret")
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert command(capsys, "train", "run.toml")[0] == 0
    before = {p: p.stat().st_mtime_ns for p in Path("data").rglob("*.*") if p.is_file()}
    use(host, "tok2secret")
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert {p: p.stat().st_mtime_ns for p in Path("data").rglob("*.*") if p.is_file()} == before
    code, said = command(capsys, "train", "run.toml", "train.steps=3")
    assert code == 0 and "continuing from step 2" in said
    # from the run's own file, in which the credentials are gone
    assert command(capsys, "train", "run", "train.steps=4")[0] == 0
    code, said = command(capsys, "prepare", "run")
    assert code == 2 and "give the whole URL again" in said
    no_secret_in(said)


def test_what_goes_wrong_is_said_without_the_credentials(host, capsys, monkeypatch):
    for url in (
        f"http://{host}/{SIGNED}wrong-tok1secret-x",
        f"http://{host}/missing.jsonl?token=tok1secret",
        "s3nosuch://me:hunter2secret@bucket/words.jsonl?sig=sig0secret&se=2",
    ):
        Path("run.toml").write_text(RUN.replace("PATH", url))
        code, said = command(capsys, "prepare", "run.toml")
        assert code == 2 and "***" in said
        no_secret_in(said)


def test_a_traceback_of_ours_is_redacted(capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    main(["--version"])
    try:
        raise ValueError("404 for url=http://h/x?token=tok1secret")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    said = capsys.readouterr().err
    assert "ValueError: 404" in said and "http://h/x?***" in said
    no_secret_in(said)


PLAIN = (
    "https://host/a/b.jsonl?download=true&version=3#part",
    "hf://datasets/owner/name@0a1b2c3d#1/4",
    "gs://bucket/corpus/**/*.jsonl.zst",
    "https://host:8080/@user/x.txt?author=twain&tokenizer=gpt2&q=a@b",
    "/data/what?/x@y/*.jsonl",
)
SECRET = {
    "https://u:p@host/x": "https://host/x",
    "https://u:p@ss@host/x?a=1": "https://host/x?a=1",
    "s3://AKIA:abc@bucket/x.parquet": "s3://bucket/x.parquet",
    "https://h/x?sv=2022&se=2025-01-01&sr=b&sp=r&sig=ab%2Fc": "https://h/x",
    "https://h/x?a=1&X-Goog-Credential=c&X-Goog-Signature=d&b=2": "https://h/x?a=1&b=2",
    "https://h/x?Expires=1&Key-Pair-Id=K&Signature=s": "https://h/x",
    "https://h/x?AWSAccessKeyId=K&Signature=s&v=1": "https://h/x?v=1",
    "https://h/x?access_token=abc#access_token=d": "https://h/x",
    "https://h/x?api-key=abc": "https://h/x",
    "https://h/x?q=eyJhbGciOiJIUzI1NiJ9.eyJzdWIi": "https://h/x",
    "zip://x.csv::https://u:p@h/a.zip?token=t": "zip://x.csv::https://h/a.zip",
}


@pytest.mark.parametrize("url", PLAIN)
def test_plain_urls_stay_as_they_are(url):
    assert without_secrets(url) == redact_text(url) == url
    assert not has_secrets(url) and not was_redacted(url)


@pytest.mark.parametrize("url", SECRET)
def test_fingerprints_see_urls_without_credentials(url):
    assert without_secrets(url) == SECRET[url] and has_secrets(url)
    shown = redact_text(url)
    assert was_redacted(shown) and redact_text(shown) == shown
    assert without_secrets(shown) == SECRET[url]
