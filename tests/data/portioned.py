"""Text and data sections of stores in portions, for their tests."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from lmwright.config.run import Data, Pack, Shuffle, Source, Tokenizer
from lmwright.data.portions import PORTIONS, parse_portions
from lmwright.data.rows.record import row_dtype
from lmwright.data.tokens.tokenizer import save_tokenizer
from tests.data.chat_problem import chat_tokenizer

T, COUNT = 16, 3
TOKENS = {"web": 1600, "books": 700}


def write_corpus(folder):
    """Two sources of several files, with documents of a few words, and a tokenizer."""
    save_tokenizer(chat_tokenizer(), folder / "tokenizer")
    draw = random.Random(7)
    for source, files in {"web": 5, "books": 2}.items():
        (folder / source).mkdir()
        for number in range(files):
            texts = [
                f"{source[0]}{number}.{i} " + " ".join(draw.choices(["ab", "cde", "f"], k=size))
                for i, size in enumerate(draw.choices(range(1, 30), k=30))
            ]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / source / f"s{number}.jsonl").write_text(lines)
    return folder


def data_of(corpus, folder, portions=COUNT, order="virtual", weights=(None, None), **changes):
    sources = tuple(
        Source(path=str(corpus / name), name=name, sample_tokens=tokens, weight=weight)
        for (name, tokens), weight in zip(TOKENS.items(), weights, strict=True)
    )
    settings = {
        "sources": sources,
        "tokenizer": Tokenizer(path=str(corpus / "tokenizer")),
        "shuffle": Shuffle(order=order, block_rows=8, seed=3),
        "pack": Pack(seq_len=T),
        "holdout_fraction": 0.15,
        "workers": 1,
        "portions": portions,
    }
    return Data(dir=str(folder), **settings | changes)


def packed_rows(folder):
    """Tokens of the packed training rows of a store, by source, read by numpy alone."""
    found = {}
    for path in sorted(Path(folder, "pack", "train").rglob("shard-*.bin")):
        records = np.fromfile(path, row_dtype(T, "uint16"))
        assert (records["length"] == T).all()
        found.setdefault(path.parent.name, []).append(records["tokens"])
    return {name: np.concatenate(rows) for name, rows in found.items()}


def list_first(whole, folder, count):
    """Lists the first portions of the whole store as finished in a folder."""
    told = parse_portions((whole / PORTIONS).read_bytes(), str(whole))
    told = replace(told, finished=told.finished[:count])
    (folder / PORTIONS).write_bytes(told.to_json())
