"""A dataset by its hub name, streamed by the real client from a hub on loopback."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.data.tokens.tokenizer import save_tokenizer
from tests.data.chat_problem import chat_tokenizer
from tests.fake_hub import SHA, FakeHub

pytest.importorskip("datasets")

SCRIPT = """
import json, sys
from lmwright.data.sources.read import read_rows
from lmwright.data.sources.files import cut_parts, find_files
from lmwright.errors import UserError
from lmwright.config.run import Source
out = []
for options in json.loads(sys.argv[1]):
    source = Source(**options)
    try:
        files = find_files(source)
        rows = [r for p in cut_parts(files, source) for s in p for r in read_rows(s, source)]
        out.append([[f.path for f in files], [[r.id, r.text, r.meta] for r in rows]])
    except UserError as e:
        out.append(str(e))
print(json.dumps(out))
"""


def parquet(texts):
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), out)
    return out.getvalue()


def loopback(hub, home):
    """Environment by which the client finds a hub."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": "hf_x",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def test_streamed_shard_by_shard(tmp_path):
    files = {
        "README.md": b"---\nlicense: mit\n---\n",
        "data/train-00000-of-00002.parquet": parquet(["one", "two"]),
        "data/train-00001-of-00002.parquet": parquet(["three"]),
        "data/test-00000-of-00001.parquet": parquet(["held out"]),
    }
    wanted = [
        {"path": "hf://datasets/me/set", "meta_columns": ("n",)},
        {"path": "hf://datasets/me/set", "split": "test"},
        {"path": "hf://datasets/me/set", "text_column": "body"},
        {"path": "hf://datasets/me/set", "split": "dev"},
        {"path": "hf://datasets/me/other"},
    ]
    with FakeHub("me/set", files) as hub:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(wanted)],
            env=os.environ | loopback(hub, tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert any("resolve" in path for path in hub.asked)
    train, test, column, split, other = json.loads(done.stdout.splitlines()[-1])
    assert len(train[0]) == 2 and all(SHA in path for path in train[0])
    assert train[1] == [
        ["train-00000:1", "one", '{"n": 0}'],
        ["train-00000:2", "two", '{"n": 1}'],
        ["train-00001:1", "three", '{"n": 0}'],
    ]
    assert [text for _, text, _ in test[1]] == ["held out"]
    assert "no column 'body', only text, n" in column
    assert "cannot be opened" in split and "dev" in split
    assert "me/other: there is no such dataset, or it is private" in other


SAMPLE = """
import json, sys
from lmwright.config.run import Data, Source, Tokenizer
from lmwright.data.prepare import prepare
source = Source(path="hf://datasets/me/set", sample_tokens=int(sys.argv[2]), name="web")
data = Data(dir=sys.argv[3], sources=(source,), tokenizer=Tokenizer(path=sys.argv[1]))
made = prepare(data, 16, stages=("tokenizer", "normalize"), workers=1)
print(json.dumps(made.stages["normalize"].facts["sampled"]))
"""


def test_shards_that_are_not_drawn_are_not_fetched(tmp_path):
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    files = {
        f"data/train-{i:05d}-of-00006.parquet": parquet([f"ab {i} {k}" for k in range(20)])
        for i in range(6)
    }
    with FakeHub("me/set", {"README.md": b"", **files}) as hub:
        done = subprocess.run(
            [sys.executable, "-c", SAMPLE, str(tmp_path / "tokenizer"), "200", str(tmp_path / "d")],
            env=os.environ | loopback(hub, tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        asked = [path for path in hub.asked if path.startswith("GET") and "parquet" in path]
    assert done.returncode == 0, done.stderr
    sampled = json.loads(done.stdout.splitlines()[-1])["web"]
    assert sampled["tokens"] >= 200 and sampled["of_parts"] == 6
    fetched = {int(re.search(r"train-0000(\d)", path)[1]) for path in asked}
    # the columns are those of the first shard, whichever is drawn
    assert 0 < sampled["parts"] < 4 and len(fetched - {0}) <= sampled["parts"], asked


def test_without_the_package(tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('no')")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([{"path": "hf://datasets/me/set"}])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        cwd=Path(tmp_path),
        capture_output=True,
        text=True,
    )
    assert "pip install -e '.[hf]'" in json.loads(done.stdout)[0].replace('\\"', '"')
