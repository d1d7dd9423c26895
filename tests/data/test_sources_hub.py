"""A dataset by its hub name, streamed by the real client from a hub on loopback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        loopback = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "hf_x",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(wanted)],
            env=os.environ | loopback,
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
