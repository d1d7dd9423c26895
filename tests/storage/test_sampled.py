"""A sample of a source in a bucket: files that are not drawn are never fetched."""

import json
import re

import pytest

from lmwright.config.run import Data, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.storage.bucket import Bucket
from tests.data.chat_problem import chat_tokenizer


def test_only_drawn_files_are_fetched(url, proxy, tmp_path):
    pytest.importorskip("gcsfs")
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    bucket = Bucket(url)
    for shard in range(8):
        lines = "".join(json.dumps({"text": f"ab cde {shard} {k}"}) + "\n" for k in range(20))
        bucket.write(f"s{shard}.jsonl", lines.encode())
    source = Source(path=f"{url}/*.jsonl", name="web", sample_tokens=400)
    data = Data(
        dir=str(tmp_path / "data"),
        sources=(source,),
        tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
    )
    proxy.asked.clear()
    from lmwright.data.text import normalize as module

    prepare(data, 16, stages=("tokenizer",), workers=1)
    made = module.normalize(data, workers=1, part_bytes=300)
    sampled = made.facts["sampled"]["web"]
    fetched = {
        found[1]
        for path in proxy.asked
        if "alt=media" in path or "/download/" in path
        if (found := re.search(r"s(\d)\.jsonl", path))
    }
    assert sampled["of_parts"] == 8 and 1 < sampled["parts"] == len(fetched) < 6, proxy.asked
    assert made.counts["input"]["web"]["rows"] <= 20 * len(fetched)
