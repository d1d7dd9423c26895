"""A store in portions: the same text as one sample, an order that does not depend on which portions
are there, and refusals of what was not declared."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from lmwright.config.run import Tokenizer
from lmwright.data import prepare_portions as module
from lmwright.data.portions import PORTIONS, folder_of
from lmwright.data.prepare import prepare
from lmwright.data.rows.store import PortionedStore, TokenStore, verify_store
from lmwright.data.text import normalize as normalize_module
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from lmwright.errors import UserError
from tests.data.portioned import COUNT, TOKENS, T, data_of, list_first, packed_rows, write_corpus
from tests.flipped import flipped

ROWS = {name: tokens // T for name, tokens in TOKENS.items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A store whose portions are all there."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    prepare(data_of(corpus, folder), T)
    return folder


@pytest.fixture
def part(whole, tmp_path):
    """Makes a store with the first portions of the whole one."""

    def make(count):
        folder = tmp_path / "part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number in range(count):
            shutil.copytree(whole / folder_of(number), folder / folder_of(number))
        list_first(whole, folder, count)
        return folder

    return make


def texts_of(folder, split="train"):
    found = {}
    for path in sorted(Path(folder, "normalize").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            if row["split"] == split:
                found.setdefault(row["source"], []).append(row["text"])
    return found


def test_the_portions_are_one_sample_cut_where_documents_end(corpus, tmp_path, monkeypatch):
    normalize = normalize_module.normalize
    monkeypatch.setattr(  # a part for each file
        normalize_module, "normalize", lambda *a, **k: normalize(*a, **k, part_bytes=1500)
    )
    prepare(data_of(corpus, tmp_path / "data"), T)
    more = {n: t + 600 for n, t in TOKENS.items()}
    sources = data_of(corpus, tmp_path).sources
    sources = tuple(replace(s, sample_tokens=more[s.name]) for s in sources)
    prepare(data_of(corpus, tmp_path / "one", portions=None, sources=sources), T)
    of_one = texts_of(tmp_path / "one")
    own = [texts_of(tmp_path / "data" / folder_of(n)) for n in range(COUNT)]
    for source in TOKENS:
        texts = [text for portion in own for text in portion[source]]
        assert texts == of_one[source][: len(texts)]
        assert len(set(texts)) == len(texts) > COUNT
    held = texts_of(tmp_path / "data" / folder_of(0), "eval")
    assert any(held.values())
    for number in range(1, COUNT):  # what would be held out of later ones is left out
        assert not texts_of(tmp_path / "data" / folder_of(number), "eval")


def test_rows_are_as_declared_in_every_portion(whole):
    total = Counter()
    for number in range(COUNT):
        rows = {name: len(r) for name, r in packed_rows(whole / folder_of(number)).items()}
        for name, count in rows.items():
            assert abs(count - ROWS[name] / COUNT) < 1
        total.update(rows)
    assert total == ROWS
    store = TokenStore.open(whole)
    assert store.epoch_rows == sum(ROWS.values()) and store.whole is False


def test_every_row_comes_once_an_epoch_portion_after_portion(whole):
    store = TokenStore.open(whole)
    for epoch in range(2):
        at = epoch * store.epoch_rows
        for number in range(COUNT):
            rows = np.concatenate(list(packed_rows(whole / folder_of(number)).values()))
            read = store.records(at, at + len(rows))["tokens"]
            assert Counter(map(bytes, read)) == Counter(map(bytes, rows))
            at += len(rows)
    first, second = (
        store.records(e * store.epoch_rows, (e + 1) * store.epoch_rows) for e in (0, 1)
    )
    assert (first["tokens"] != second["tokens"]).any()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_do_not_depend_on_the_portions_that_are_there(whole, stores, draw):
    there = draw.draw(st.integers(1, COUNT))
    store, all_of = stores[there], TokenStore.open(whole)
    epochs = 1 if there < COUNT else 3
    end = int(store.portions.ends[there - 1]) + (epochs - 1) * store.epoch_rows
    start = draw.draw(st.integers(0, end - 1))
    stop = draw.draw(st.integers(start + 1, end))
    assert store.there(stop)
    beyond = store.epoch_rows + draw.draw(st.integers(1, 3))  # the second epoch has all of them
    assert store.portions.last(beyond) == COUNT - 1 and store.there(beyond) == (there == COUNT)
    assert (store.records(start, stop) == all_of.records(start, stop)).all()
    assert store.fingerprint == all_of.fingerprint


@pytest.fixture(scope="module")
def stores(whole, tmp_path_factory):
    """Stores of which only the first portions are there, by their number."""
    made = {}
    for count in range(1, COUNT + 1):
        folder = tmp_path_factory.mktemp(f"first{count}")
        for number in range(count):
            (folder / folder_of(number)).symlink_to(whole / folder_of(number))
        list_first(whole, folder, count)
        made[count] = TokenStore.open(folder)
    return made


def test_a_portion_that_comes_is_taken_in(whole, part):
    folder = part(1)
    store = TokenStore.open(folder)
    end = int(store.portions.ends[0])
    assert store.there(end) and not store.there(end + 1)
    with pytest.raises(UserError, match="portion 2 of 3 is not finished; `lmwright prepare`"):
        store.records(0, end + 1)
    shutil.copytree(whole / folder_of(1), folder / folder_of(1))
    assert not store.there(end + 1)  # its files alone say nothing
    list_first(whole, folder, 2)
    assert store.there(end + 1)
    assert (store.records(0, end + 1) == TokenStore.open(whole).records(0, end + 1)).all()


@pytest.mark.parametrize("order, weights", [("written", (1.0, 3.0)), ("none", (None, None))])
def test_other_orders_and_weights_are_as_virtual_ones(corpus, tmp_path, order, weights):
    stores = []
    for kind in {"virtual", order} if order == "written" else {order}:
        folder = tmp_path / kind
        prepare(data_of(corpus, folder, order=kind, weights=weights), T)
        stores.append(TokenStore.open(folder))
    rows = stores[0].epoch_rows
    read = [store.records(0, 2 * rows) for store in stores]
    assert all((one == read[0]).all() for one in read)
    if order == "none":
        own = packed_rows(tmp_path / "none" / folder_of(0))
        together = np.concatenate([own[name] for name in sorted(own)])
        assert (read[0]["tokens"][: len(together)] == together).all()


def test_a_second_run_does_nothing_and_a_damaged_portion_is_made_again(
    corpus, tmp_path, capsys, monkeypatch
):
    data = data_of(corpus, tmp_path / "data")
    prepare(data, T, keep="store")
    listed = (tmp_path / "data" / PORTIONS).read_bytes()
    rows = TokenStore.open(tmp_path / "data").records(0, 100)
    capsys.readouterr()
    assert not prepare(data, T).stages and not capsys.readouterr().out
    shard = next((tmp_path / "data" / folder_of(1)).glob("pack/train/web/*.bin"))
    shard.unlink()
    prepare(data, T)
    assert "portion 2 of 3" in capsys.readouterr().out
    assert (tmp_path / "data" / PORTIONS).read_bytes() == listed
    assert (TokenStore.open(tmp_path / "data").records(0, 100) == rows).all()


def test_a_preparation_that_is_killed_goes_on(corpus, whole, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    data = data_of(corpus, tmp_path / "data")
    write, calls = module._write, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 2:  # the second portion is made, and not yet listed
            raise Killed
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", killed)
        with pytest.raises(Killed):
            prepare(data, T)
    store = TokenStore.open(tmp_path / "data")
    assert store.portions.finished == 1
    prepare(data, T)
    assert (tmp_path / "data" / PORTIONS).read_bytes() == (whole / PORTIONS).read_bytes()
    all_of = TokenStore.open(whole).records(0, 300)
    assert store.there(300) and (store.records(0, 300) == all_of).all()


@pytest.fixture
def begun(corpus, tmp_path):
    """(files, settings) of a store of which the first of two portions is finished."""
    own = shutil.copytree(corpus, tmp_path / "own")
    data = data_of(own, tmp_path / "data", portions=2)
    prepare(data, T)
    told = module.parse_portions((tmp_path / "data" / PORTIONS).read_bytes(), "")
    one = replace(told, finished=told.finished[:1])
    (tmp_path / "data" / PORTIONS).write_bytes(one.to_json())
    shutil.rmtree(tmp_path / "data" / folder_of(1))
    return own, data


def test_copies_of_the_files_are_the_same(begun, tmp_path):
    """Whose times are others."""
    own, data = begun
    for path in own.rglob("*.*"):
        os.utime(path, (1, 1))
    prepare(data, T)
    assert TokenStore.open(tmp_path / "data").portions.finished == 2


def test_files_that_changed_between_portions_are_refused(begun):
    own, data = begun
    (own / "web" / "another.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    with pytest.raises(UserError, match="web: its files are not those that the portions before"):
        prepare(data, T)


def test_too_little_text_is_told_by_its_portion(corpus, tmp_path):
    sources = data_of(corpus, tmp_path).sources
    sources = (replace(sources[0], sample_tokens=12000), sources[1])
    with pytest.raises(UserError, match=r"web: portion [23] has only .* lower sample_tokens"):
        prepare(data_of(corpus, tmp_path / "data", sources=sources), T)
    assert TokenStore.open(tmp_path / "data").portions.finished >= 1


def test_a_portion_that_is_not_the_listed_one_is_refused(corpus, whole, part, tmp_path):
    folder = part(3)
    shutil.rmtree(folder / folder_of(1))
    shutil.copytree(folder / folder_of(2), folder / folder_of(1))
    store = TokenStore.open(folder)
    end = int(store.portions.ends[0])
    with pytest.raises(UserError, match=r"portion-001: is not the portion that"):
        store.records(end, end + 1)
    other = tmp_path / "other"
    prepare(data_of(corpus, other, portions=2), T)
    store = TokenStore.open(part(1))
    shutil.copy(other / PORTIONS, part(1) / PORTIONS)
    with pytest.raises(UserError, match="was prepared anew with other settings or text"):
        store.there(end + 1)


def test_a_damaged_list_is_refused(part):
    folder = part(2)
    raw = (folder / PORTIONS).read_bytes()
    for bad in (raw.replace(b'"count": 3', b'"count": 4'), b"{}", b"[]", raw[:-9], b'{"format":'):
        (folder / PORTIONS).write_bytes(bad)
        with pytest.raises(UserError, match=r"portions\.json is damaged"):
            TokenStore.open(folder)
    list_first(part(2), folder, 0)
    with pytest.raises(UserError, match="no portion is finished"):
        TokenStore.open(folder)


def test_a_store_of_the_other_kind_is_not_written_over(corpus, tmp_path):
    data = data_of(corpus, tmp_path / "data", portions=None)
    prepare(data, T)
    with pytest.raises(UserError, match="holds a store without portions"):
        prepare(replace(data, portions=COUNT), T)
    prepare(data_of(corpus, tmp_path / "cut", portions=2), T)
    with pytest.raises(UserError, match="holds a store in portions"):
        prepare(replace(data, dir=str(tmp_path / "cut")), T)


def test_verify_names_the_portion(part):
    folder = part(2)
    verified = verify_store(folder)
    assert {one.stage.split("/")[0] for one in verified} == {folder_of(0), folder_of(1)}
    shard = next((folder / folder_of(1)).glob("pack/train/web/*.bin"))
    shard.write_bytes(flipped(shard.read_bytes()))
    with pytest.raises(UserError, match=r"portion-001/pack/train/web/.* was altered"):
        verify_store(folder)


def test_it_is_a_store_of_its_kind(whole):
    assert isinstance(TokenStore.open(whole), PortionedStore)
    assert not isinstance(TokenStore.open(whole / folder_of(1)), PortionedStore)


def with_bos_alone(corpus, folder):
    """The tokenizer of the corpus with a token before each text, and none that fills rows."""
    tokenizer = load_tokenizer(corpus / "tokenizer")
    bos = [("<s>", tokenizer.backend.token_to_id("<s>"))]
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.spec))
    backend.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", bos)
    save_tokenizer(replace(tokenizer, backend=backend, bos="<s>", pad=None), folder)
    return Tokenizer(path=str(folder))


def test_a_summary_of_portions_has_the_tokenizer_once(corpus, tmp_path):
    """Whose counts are no numbers to add."""
    spec = with_bos_alone(corpus, tmp_path / "tokenizer")
    made = prepare(data_of(corpus, tmp_path / "data", tokenizer=spec), T)
    about = made.stages["tokenizer"].counts["about"]
    assert about["pad_id"] is None and len(about["tokenizer_fingerprint"]) == 64
