"""Answers of the compiler are found again, for the same program and compiler only."""

import importlib.metadata

import pytest

from lmwright.program import cache

ANSWER = {"compile_s": 1.5, "temp_bytes": 7}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")


def test_an_answer_is_found_again():
    key = cache.key_of("program", "v4-8", {})
    assert cache.load(key) is None
    cache.save(key, ANSWER, "HloModule x" * 1000)
    assert cache.load(key) == (ANSWER, "HloModule x" * 1000)
    cache.save(key, ANSWER, "")  # a program that does not fit has no text
    assert cache.load(key) == (ANSWER, "")


def test_what_changes_the_answer_changes_the_key(monkeypatch):
    keys = {
        cache.key_of("program", "v4-8", {}),
        cache.key_of("another", "v4-8", {}),
        cache.key_of("program", "v5e-8", {}),
        cache.key_of("program", "v4-8", {"xla_name": "true"}),
    }
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2")
    assert len(keys | {cache.key_of("program", "v4-8", {})}) == 5


@pytest.mark.parametrize("name", ["answer.json", "step.hlo.zst"])
def test_a_broken_entry_is_none(name):
    key = cache.key_of("program", "v4-8", {})
    cache.save(key, ANSWER, "HloModule")
    path = cache.cache_folder() / key / name
    path.write_bytes(path.read_bytes()[:-3])
    assert cache.load(key) is None


def test_the_oldest_entries_go(monkeypatch):
    monkeypatch.setattr(cache, "ENTRIES", 2)
    keys = [cache.key_of(str(i), "v4-8", {}) for i in range(4)]
    for key in keys:
        cache.save(key, ANSWER, "")
    assert sum(cache.load(key) is not None for key in keys) == 2 and cache.load(keys[-1])


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    tmp_path.joinpath("lmwright").write_text("in the way")
    cache.save("0", ANSWER, "")
    assert cache.load("0") is None
