"""A tokenizer by its hub name, fetched by the real client from a hub on loopback."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers

from lmwright.config.run import Data, Tokenizer
from lmwright.data.stale import find_changes
from tests.fake_hub import SHA, FakeHub

pytest.importorskip("huggingface_hub")

TOKEN = "hf_verysecret"
TEXT = "the cat sat on the mat and the cat ate the rat\n\n" * 40
CHAT = (
    '{"messages": [{"role": "user", "content": "the cat"}, '
    '{"role": "assistant", "content": "sat on the mat"}]}\n'
)
SCRIPT = """
import json, sys
from lmwright.config.run import Data, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.manifest import read_manifest
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError
out = []
rows, *names = sys.argv[2:]
source = {"text": ("text.txt", {"documents": "paragraph"}), "messages": ("chat.jsonl", {})}[rows]
for name in names:
    data = Data(
        dir=f"{sys.argv[1]}/{name.replace('/', '-')}",
        sources=(Source(path=f"{sys.argv[1]}/{source[0]}", rows=rows, **source[1]),),
        tokenizer=Tokenizer(path=name),
        pack=Pack(method="best-fit"),
    )
    try:
        prepare(data, seq_len=16, workers=1)
        made = read_manifest(f"{data.dir}/tokenizer").fingerprint["fingerprint"]
        ids = load_tokenizer(f"{data.dir}/tokenizer").encode("the rat sat")
        out.append([made["hub"], sorted(made["files"]), list(map(int, ids))])
    except UserError as error:
        out.append(str(error))
print(json.dumps(out))
"""


def trained(size):
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TEXT], size, special_tokens=["<|endoftext|>"], show_progress=False
    )
    return json.loads(tokenizer.to_str())


def files(size):
    return {
        "config.json": b"{}",
        "tokenizer.json": json.dumps(trained(size)).encode(),
        "tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}',
        "model.safetensors": b"gigabytes",
        "tokenizer.py": b"raise SystemExit('run')",
    }


def prepared(hub, folder, *names, token="", offline="", rows="text"):
    loopback = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "cache"),
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "chat.jsonl").write_text(CHAT * 40)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), rows, *names],
        env=os.environ | loopback, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tokenizer_is_pinned_to_the_commit_that_its_name_had(tmp_path):
    held = files(280)
    with FakeHub("me/tok", held, kind="models", token=TOKEN) as hub:
        both = prepared(hub, tmp_path, "hf://me/tok", "me/tok", token=TOKEN)
        commit = f"hf://me/tok@{SHA}"
        theirs = tokenizers.Tokenizer.from_str(held["tokenizer.json"].decode())
        ids = theirs.encode("the rat sat").ids
        wanted = ["tokenizer.json", "tokenizer_config.json"]
        assert both == [
            [{"path": name, "commit": commit}, wanted, ids] for name in ("hf://me/tok", "me/tok")
        ]
        fetched = {path.rsplit("/", 1)[1] for path in hub.asked if "/resolve/" in path}
        assert fetched == set(wanted)
        assert hub.asked.count("GET /api/models/me/tok") == 2  # once for each

        hub.files = files(300)  # the name moves on; what was prepared stays, and nobody asks
        hub.asked.clear()
        assert prepared(hub, tmp_path, "hf://me/tok", token=TOKEN) == both[:1]
        assert hub.asked == []

    def changes(path):
        data = Data(dir=str(tmp_path / "hf:--me-tok"), tokenizer=Tokenizer(path=path))
        return [change for change in find_changes(data) if change[0] == "data.tokenizer.path"]

    assert not any(map(changes, ("hf://me/tok", "me/tok", commit)))  # `train` asks nobody, either
    for other in ("hf://me/other", "hf://me/tok@v2"):
        assert changes(other) == [("data.tokenizer.path", "hf://me/tok", other)]


def test_the_chat_template_of_a_tokenizer_is_pinned_too(tmp_path):
    told = (
        "{%% for m in messages %%}%s{%% generation %%}{{ m['content'] }}{%% endgeneration %%}"
        "{%% endfor %%}"
    )
    held, moved = files(280), files(300)
    for each, mark in ((held, "<"), (moved, ">")):
        roles = {"eos_token": "<|endoftext|>", "chat_template": told % mark}
        each["tokenizer_config.json"] = json.dumps(roles).encode()
    with FakeHub("me/tok", held, kind="models") as hub:
        first = prepared(hub, tmp_path, "hf://me/tok", rows="messages")
        assert first[0][0] == {"path": "hf://me/tok", "commit": f"hf://me/tok@{SHA}"}
        assert hub.asked.count("GET /api/models/me/tok") == 1
        hub.commit(moved, "f" * 40)
        assert prepared(hub, tmp_path, "hf://me/tok", rows="messages") == first


def test_a_tokenizer_that_there_is_not(tmp_path):
    with FakeHub("me/tok", files(280), kind="models", token=TOKEN) as hub:
        gated, unknown = prepared(hub, tmp_path, "hf://me/tok", "hf://me")
        assert gated == (
            "data.tokenizer.path: hf://me/tok: is gated; accept its terms at "
            "https://huggingface.co/me/tok and set HF_TOKEN to a token that may read it"
        )
        assert "gated" in unknown  # this hub gates whatever it is asked for
        assert not (tmp_path / "hf:--me-tok").exists()  # refused before the first stage
    with FakeHub("me/empty", {"config.json": b"{}"}, kind="models") as hub:
        empty, gone, odd, offline = prepared(
            hub, tmp_path, "me/empty", "me/gone", "hf://me/a/b", "hf://me/empty@nowhere"
        )
        assert "me/empty (no file or folder here, so a name on the hub): holds no tok" in empty
        assert "there is no such repository, or it is private" in gone
        assert "write hf://owner/name" in odd
        assert "has no revision 'nowhere'" in offline
