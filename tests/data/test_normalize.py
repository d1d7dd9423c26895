"""Normalize: one schema, exact dedup, hold-out by content, quarantine, limits of bad rows."""

import json
import random
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmwright.config.run import Data, Normalize, Source
from lmwright.data import stage as stage_module
from lmwright.data.text import normalize as normalize_module
from lmwright.data.text.dedup import keep_first
from lmwright.data.text.normalize import normalize
from lmwright.errors import UserError


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return str(path)


def table(manifest):
    names = sorted(n for n in manifest.files if n.endswith(".parquet"))
    return [row for n in names for row in pq.read_table(Path(manifest.folder) / n).to_pylist()]


def run(tmp_path, *sources, part_bytes=1 << 20, holdout=0.0, name="data", **options):
    data = Data(
        dir=str(tmp_path / name),
        sources=sources,
        holdout_fraction=holdout,
        normalize=Normalize(**options),
    )
    return normalize(data, workers=1, part_bytes=part_bytes)


def test_one_schema(tmp_path):
    (tmp_path / "a.csv").write_text("key,text,year\nk1,\u0065\u0301,1999\nk2,two,\n")
    write_jsonl(tmp_path / "b.jsonl", ["three", " \n"])
    manifest = run(
        tmp_path,
        Source(path=str(tmp_path / "a.csv"), id_column="key", meta_columns=("year",)),
        Source(path=str(tmp_path / "b.jsonl"), use="eval", name="held out"),
        unicode="nfc",
    )
    assert table(manifest) == [
        {"id": "k1", "text": "\u00e9", "source": "a", "meta": '{"year": "1999"}', "split": "train"}
        | {"rows": "text"},
        {"id": "k2", "text": "two", "source": "a", "meta": '{"year": ""}', "split": "train"}
        | {"rows": "text"},
        {
            "id": "b.jsonl:1",
            "text": "three",
            "source": "held out",
            "meta": "{}",
            "split": "eval",
            "rows": "text",
        },
    ]
    assert manifest.counts["sources"] == {
        "train": {"a": {"docs": 2, "bytes": 5}},
        "eval": {"held out": {"docs": 1, "bytes": 5}},
    }
    assert manifest.counts["input"]["held out"]["empty"] == 1


texts = st.lists(
    st.sampled_from(["a", "b", "c", "\u00e9", "e\u0301", "d" * 30, "f", "g"]),
    min_size=1,
    max_size=40,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts, texts, st.integers(20, 300), st.sampled_from(["none", "nfc"]))
def test_dedup_keeps_the_first_and_eval_wins(tmp_path_factory, one, two, part_bytes, form):
    folder = tmp_path_factory.mktemp("dedup")
    manifest = run(
        folder,
        Source(path=write_jsonl(folder / "one.jsonl", one)),
        Source(path=write_jsonl(folder / "two.jsonl", two), use="eval"),
        part_bytes=part_bytes,
        dedup="exact",
        unicode=form,
    )
    if form == "nfc":
        one, two = ([unicodedata.normalize("NFC", t) for t in ts] for ts in (one, two))
    seen, expected = set(), {"two": [], "one": []}
    for name, found in (("two", two), ("one", one)):
        for i, text in enumerate(found):
            if text not in seen:
                seen.add(text)
                expected[name].append((f"{name}.jsonl:{i + 1}", text))
    rows = table(manifest)
    for name, kept in expected.items():
        assert [(r["id"], r["text"]) for r in rows if r["source"] == name] == kept
    tally = manifest.counts["input"]
    assert tally["one"]["duplicates"] == len(one) - len(expected["one"])
    docs = {n: e["docs"] for s in manifest.counts["sources"].values() for n, e in s.items()}
    assert docs == {n: len(kept) for n, kept in expected.items() if kept}
    assert not (folder / "data/read").exists()


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4), st.data())
@settings(max_examples=50, deadline=None)
def test_buckets_change_nothing(tmp_path_factory, parts, data):
    folder = tmp_path_factory.mktemp("hashes")
    first = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    # equal first halves too, so that both halves of a hash are compared
    tables = [np.array([(v // 2, v % 2) for v in p], np.uint64).reshape(-1, 2) for p in parts]
    paths = []
    for i, found in enumerate(tables):
        paths.append(folder / f"{i}.npy")
        np.save(paths[-1], found)
    seen, expected = set(), [[] for _ in parts]
    for i in sorted(range(len(parts)), key=lambda i: (not first[i], i)):
        for row, value in enumerate(parts[i]):
            if value in seen:
                expected[i].append(row)
            seen.add(value)
    for bucket_docs in (1, 5, 10**6):
        assert [d.tolist() for d in keep_first(paths, first, bucket_docs)] == expected


def test_held_out_by_content_alone(tmp_path):
    docs = [f"document {i} " * (i % 5 + 1) for i in range(2000)]
    held = []
    for name, order in (("a", docs), ("b", random.Random(3).sample(docs, len(docs)))):
        source = Source(path=write_jsonl(tmp_path / f"{name}.jsonl", order))
        manifest = run(tmp_path, source, holdout=0.2, name=f"out-{name}", part_bytes=5000)
        held.append({r["text"] for r in table(manifest) if r["split"] == "eval"})
    assert held[0] == held[1]
    assert abs(len(held[0]) - 400) < 4 * (2000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("dedup", ["exact", "none"])
def test_a_source_of_which_chance_holds_out_all_is_learned_too(tmp_path, dedup):
    """As if chance had held out nothing, but for the length of an end."""
    several = [f"text {i} " * 40 for i in range(3)]
    for name, docs in {"few": several, "short": ["one"], "twice": ["same", "same"]}.items():
        source = Source(path=write_jsonl(tmp_path / f"{name}.jsonl", docs))
        of = {"part_bytes": 400, "dedup": dedup}
        found = run(tmp_path, source, holdout=1 - 1e-9, name=f"{name}-all", **of)
        expected = run(tmp_path, source, holdout=1e-9, name=f"{name}-none", **of)
        assert table(found) == table(expected)
        assert found.counts["sources"] == expected.counts["sources"]
        assert "train" in found.counts["sources"]
    text = "one two three. " * 500
    (tmp_path / "long.txt").write_text(text)
    found = run(tmp_path, Source(path=str(tmp_path / "long.txt")), holdout=1 - 1e-2, dedup=dedup)
    assert [r["split"] for r in table(found)] == ["train", "eval"]
    assert "".join(r["text"] for r in table(found)).strip() == text.strip()


def test_bad_rows_are_quarantined_with_their_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"text {i}" * 10}) for i in range(300)]
    for i in (7, 150, 290):
        lines[i] = '{"text": '
    path.write_text("\n".join(lines) + "\n")
    manifest = run(tmp_path, Source(path=str(path)), part_bytes=2000, max_bad_fraction=0.02)
    entries = [json.loads(line) for line in (tmp_path / "data/normalize/quarantine.jsonl").open()]
    assert [e["line"] for e in entries] == [8, 151, 291]
    assert all(e["file"] == str(path) and "invalid JSON" in e["reason"] for e in entries)
    assert manifest.counts["input"]["a"] | {} == {
        "rows": 300,
        "bad": 3,
        "missing": 0,
        "empty": 0,
        "duplicates": 0,
    }
    rows = table(manifest)
    assert [r["id"] for r in rows] == [
        f"a.jsonl:{i + 1}" for i in range(300) if i not in (7, 150, 290)
    ]
    with pytest.raises(UserError, match="3 of 300 rows are bad"):
        run(tmp_path, Source(path=str(path)), part_bytes=2000, max_bad_fraction=0.005)


@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_too_many_bad_rows_leave_nothing_finished(tmp_path, dedup, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 50 + "oops\n" * 2)
    with pytest.raises(UserError, match=r"2 of 52 rows are bad.*a\.jsonl:51 invalid JSON") as e:
        run(tmp_path, Source(path=str(path)), dedup=dedup)
    assert not list(tmp_path.rglob("manifest.json"))
    listed = next(w for w in str(e.value).split() if w.endswith("quarantine.jsonl;")).rstrip(";")
    assert len(Path(listed).read_text().splitlines()) == 2
    # a larger limit goes on with what was read
    monkeypatch.setattr(stage_module, "_run_parts", only_if_nothing_is_left(dedup))
    manifest = run(tmp_path, Source(path=str(path)), dedup=dedup, max_bad_fraction=0.1)
    assert Counter(r["text"] for r in table(manifest)) == {"x": 50 if dedup == "none" else 1}


def only_if_nothing_is_left(dedup):
    original = stage_module._run_parts

    def check(folder, draw, done, *rest):
        left = draw.expected(done) - len(done)
        assert not left or (dedup == "exact" and folder.name == "normalize")
        original(folder, draw, done, *rest)

    return check


def test_what_stops_with_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    with pytest.raises(UserError, match=r"no row of .*a\.jsonl has 'body'.*text_column"):
        run(tmp_path, Source(path=path, text_column="body"), max_bad_fraction=0.9)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(UserError, match="hold no text"):
        run(tmp_path, Source(path=str(tmp_path / "b.jsonl")))
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        run(tmp_path)
    with pytest.raises(UserError, match=r"data\.dir"):
        normalize(Data(dir="gs://b/c", sources=(Source(path=path),)))
    assert not list(tmp_path.rglob("manifest.json"))


def test_changed_input_is_read_again(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["x"])
    source = Source(path=str(path))
    first = run(tmp_path, source)
    assert run(tmp_path, source).hash == first.hash
    assert run(tmp_path, Source(path=str(path), weight=2.0)).hash == first.hash
    write_jsonl(path, ["x", "y"])
    assert [r["text"] for r in table(run(tmp_path, source))] == ["x", "y"]
    assert [r["split"] for r in table(run(tmp_path, Source(path=str(path), use="eval")))] == [
        "eval"
    ] * 2


@pytest.mark.parametrize("change", ["grown", "gone"])
def test_input_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
    """Part of a file that is being downloaded is no corpus."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["one", "two"])
    rows = normalize_module.read_rows

    def read(piece, source):
        yield from rows(piece, source)
        if change == "gone":
            path.unlink()
        else:
            write_jsonl(path, ["one", "two", "three"])

    with monkeypatch.context() as patch:
        patch.setattr(normalize_module, "read_rows", read)
        with pytest.raises(UserError, match=r"a\.jsonl changed while it was read; run again"):
            run(tmp_path, Source(path=str(path)))
    assert not (tmp_path / "data/normalize/manifest.json").exists()
    write_jsonl(path, ["one", "two", "three"])
    assert len(table(run(tmp_path, Source(path=str(path))))) == 3
