"""Samples of a source by tokens: which files are read, and that the tokens are those asked for.

Tokens are counted by the `tokenizers` library on the texts themselves.
"""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Data, Normalize, Source, Tokenizer
from lmwright.data import stage as stage_module
from lmwright.data import workers as workers_module
from lmwright.data.manifest import read_manifest
from lmwright.data.prepare import prepare
from lmwright.data.sources import read as read_module
from lmwright.data.text import normalize as normalize_module
from lmwright.data.text.parts import Part
from lmwright.data.text.sample import SampleDraw
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import chat_tokenizer
from tests.data.user_run import RUN, command

FILES, DOCS = 8, 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of eight shards and a tokenizer, and each document's tokens with its end."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("corpus")
    save_tokenizer(chat_tokenizer(), folder / "tokenizer")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    draw, sizes = random.Random(0), {}
    (folder / "text").mkdir()
    for shard in range(FILES):
        texts = [
            f"{shard}.{i} " + " ".join(draw.choices(["ab", "cde", "f"], k=draw.randint(1, 60)))
            for i in range(DOCS)
        ]
        path = folder / "text" / f"s{shard}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for text in texts:
            ids = theirs.encode(text, add_special_tokens=False).ids
            sizes[text] = len(ids) + 1
    return folder, sizes


def data_of(corpus, tmp_path, sample_tokens, seed=0, **options):
    source = Source(
        path=str(corpus[0] / "text"), name="web", sample_tokens=sample_tokens, sample_seed=seed
    )
    tokenizer = Tokenizer(path=str(corpus[0] / "tokenizer"))
    return Data(dir=str(tmp_path / "data"), sources=(source,), tokenizer=tokenizer, **options)


def texts_of(data):
    manifest = read_manifest(Path(data.dir) / "normalize")
    files = sorted(name for name in manifest.files if name.endswith(".parquet"))
    tables = [pq.read_table(Path(manifest.folder) / name).to_pylist() for name in files]
    return [row["text"] for table in tables for row in table], manifest


@pytest.fixture
def small_parts(monkeypatch):
    """Every file is a part of its own, and the files that were opened are listed."""
    opened, original = [], read_module.read_rows
    normalize = normalize_module.normalize

    def read_rows(piece, source):
        opened.append(piece.file.name)
        return original(piece, source)

    def with_small_parts(data, **options):
        return normalize(data, **options, part_bytes=4000)

    monkeypatch.setattr(normalize_module, "read_rows", read_rows)
    monkeypatch.setattr(normalize_module, "normalize", with_small_parts)
    return opened


@pytest.mark.parametrize("wanted", [500, 5000])
def test_documents_up_to_the_tokens_asked_for(corpus, tmp_path, wanted, small_parts):
    data = data_of(corpus, tmp_path, wanted)
    summary = prepare(data, 64, workers=1)
    texts, manifest = texts_of(data)
    sizes = [corpus[1][text] for text in texts]
    assert sum(sizes) >= wanted > sum(sizes[:-1])
    tokens = sum(row["tokens"] for row in summary.rows())
    assert tokens == sum(sizes) == manifest.facts["sampled"]["web"]["tokens"]
    # each shard is read from its start, in an order that is drawn
    shards = list(dict.fromkeys(text.split(".")[0] for text in texts))
    for shard in shards:
        mine = [text for text in texts if text.startswith(f"{shard}.")]
        assert [t.split()[0] for t in mine] == [f"{shard}.{i}" for i in range(len(mine))]
    assert {name[1] for name in small_parts} == set(shards)
    assert len(shards) < FILES and summary.input()["web"]["rows"] == len(texts)


def test_a_larger_sample_begins_with_the_smaller_one(corpus, tmp_path, small_parts):
    found = []
    for wanted in (500, 5000):
        data = data_of(corpus, tmp_path / str(wanted), wanted)
        prepare(data, 64, stages=("tokenizer", "normalize"), workers=1)
        found.append(texts_of(data)[0])
    assert found[1][: len(found[0])] == found[0] and len(found[1]) > len(found[0])


def test_the_seed_draws_the_order(corpus, tmp_path, small_parts):
    first = {}
    for seed in range(6):
        data = data_of(corpus, tmp_path / str(seed), 500, seed)
        prepare(data, 64, stages=("tokenizer", "normalize"), workers=1)
        first[seed] = texts_of(data)[0][0].split(".")[0]
    assert len(set(first.values())) > 2


def test_any_workers_and_any_kill_give_the_same(corpus, tmp_path, small_parts, monkeypatch):
    data = data_of(corpus, tmp_path, 5000)
    prepare(data, 64, workers=1)
    wanted = texts_of(data)[0]
    monkeypatch.undo()
    many = data_of(corpus, tmp_path / "many", 5000)
    prepare(many, 64, stages=("tokenizer",))
    pools, original = [], workers_module.ProcessPoolExecutor
    with monkeypatch.context() as patch:
        patch.setattr(
            workers_module,
            "ProcessPoolExecutor",
            lambda size, *rest: pools.append(size) or original(size, *rest),
        )
        normalize_module.normalize(many, workers=2, part_bytes=4000)
    assert pools == [2] and texts_of(many)[0] == wanted
    run_part, count = stage_module._run_part, 0

    def killed(*args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return run_part(*args)

    again = data_of(corpus, tmp_path / "again", 5000)
    prepare(again, 64, stages=("tokenizer",))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage_module, "_run_part", killed)
        normalize_module.normalize(again, workers=1, part_bytes=4000)
    assert len(list((Path(again.dir) / "normalize" / "parts").iterdir())) == 2
    normalize_module.normalize(again, workers=1, part_bytes=4000)
    texts, manifest = texts_of(again)
    assert texts == wanted and manifest.hash == texts_of(data)[1].hash


@pytest.mark.parametrize("seed", range(8))
def test_few_parts_too_many_are_made_in_parallel(seed):
    """Eight at a time, which end in any order, of parts of about as many tokens each."""
    draw = random.Random(seed)
    sizes = [draw.randint(80, 120) for _ in range(100)]
    source = Source(path="a", sample_tokens=3000)
    parts = [Part(number, "a", source, (), "none", 0.0, False, 3000, None) for number in range(100)]
    sample, done, running, made = SampleDraw(parts), {}, {}, []
    while True:
        while len(running) < 8 and (drawn := sample.next(done, set(running))):
            running[drawn[0]] = drawn[1].most_tokens
            made.append(drawn[0])
        if not running:
            break
        number = draw.choice(sorted(running))
        most = running.pop(number)
        entry = {"tokens": min(sizes[number], most), "most_tokens": most}
        done[number] = {"sampled": {"a": entry}}
    used = sample.used(done)
    ends = list(itertools.accumulate(sizes))
    assert used == list(range(next(i for i, end in enumerate(ends, 1) if end >= 3000)))
    # one is the last, which is made again up to what is needed
    assert len(made) <= len(used) + 2
    assert sum(done[i]["sampled"]["a"]["tokens"] for i in used) == 3000


def test_duplicates_are_dropped_from_a_sample(corpus, tmp_path, small_parts):
    data = data_of(corpus, tmp_path, 5000, normalize=Normalize(dedup="exact"))
    other = replace(data.sources[0], name="eval", use="eval", sample_tokens=2500)
    summary = prepare(replace(data, sources=(*data.sources, other)), 64, workers=1)
    docs = {row["source"]: row["docs"] for row in summary.rows()}
    sampled = summary.stages["normalize"].facts["sampled"]
    assert 5000 <= sampled["web"]["tokens"] < 5200 and 2500 <= sampled["eval"]["tokens"] < 2700
    assert summary.input()["web"]["duplicates"] == docs["eval"] > 10
    assert summary.input()["web"]["rows"] == docs["web"] + docs["eval"]


def test_more_than_there_is(corpus, tmp_path, small_parts):
    have = sum(corpus[1].values())
    with pytest.raises(UserError, match=f"web: sample_tokens = 900,000, but all .* {have:,} tok"):
        prepare(data_of(corpus, tmp_path, 900_000), 64, workers=1)
    data = data_of(corpus, tmp_path, have)
    prepare(data, 64, workers=1)
    assert len(texts_of(data)[0]) == FILES * DOCS


SOURCE = '{ path = "PATH", name = "words" }'


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ("sample_tokens = 9", "", "0.sample_tokens: its tokens cannot be counted"),
        ("sample_seed = 1", "", "0.sample_seed: has no effect without sample_tokens"),
        ('sample_tokens = 9, rows = "alpaca"', "", "0.sample_tokens: counts the tokens of texts"),
    ],
)
def test_what_is_refused(corpus, tmp_path, capsys, monkeypatch, source, tokenizer, message):
    monkeypatch.chdir(tmp_path)
    run = RUN.replace(SOURCE, f'{{ path = "{corpus[0]}/text", name = "web", {source} }}')
    Path("run.toml").write_text(run)
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and message in said and not Path("data").exists()


def test_a_run_file_says_what_was_read(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus[0] / "tokenizer", "mine")
    run = RUN.replace(SOURCE, f'{{ path = "{corpus[0]}/text", name = "web", sample_tokens = 999 }}')
    run = run.replace("tokenizer = { vocab_size = 300 }", 'tokenizer = { path = "mine" }')
    Path("run.toml").write_text(run)
    code, said = command(capsys, "prepare", "run.toml", "model.vocab_size=1000")
    assert code == 0, said
    assert "web: a sample of 1,0" in said and "from 1 of 1 parts" in said
    code, said = command(capsys, "prepare", "run.toml", "model.vocab_size=1000")
    assert code == 0 and "up to date" in said
